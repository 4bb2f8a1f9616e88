"""Averages of two ranks, made whenever one of them asks for one, concurrently with their computation.

A rank *shows* a bucket: a copy of its values after their newest update, with all averages since. It asks another rank
by sending what it shows, m. The other rank moves what it shows itself, z, half of the way to m, and replies with this
difference d = (m - z) / 2, which the first rank subtracts. After that both show their mean. What is shown is changed
with the bucket locked, for the duration of one pass over it; parameters and optimizer are never locked. The differences
are also accumulated separately, in ``pending``, until the training thread adds them to the parameters right before it
updates these: what one rank adds the other subtracts, bit for bit, so the mean over ranks is exact.

While a rank waits for a reply, what it shows does not change. A rank that asks it meanwhile has to wait if its own
number is the higher one, and is refused otherwise; so ranks never wait for each other in a circle, on any graph. Two
ranks that have asked each other notice this as each gets the other's question, which serves as the reply.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from loguru import logger

from gossip.communication.host import daemon_threads
from gossip.compression.conversation import Arrival, Conversation, Turn, accumulation_dtype, chunks, finite_on_host
from gossip.elastic.connections.peer_connection import Frame, Key, Kind, Outgoing
from gossip.elastic.elastic_world import ElasticWorld, Questions
from gossip.exchange.message_notes import note
from gossip.exchange.recording import Average
from gossip.exchange.transport import LateDifference, Transport
from topologies import Round


@dataclass
class Asked:
    """An unanswered question to another rank, asked after a step of this one."""

    member: int
    step: int
    frame: Outgoing


@dataclass
class Shown:
    """One bucket as other ranks see it. Everything except ``lock`` is only changed with the lock held."""

    values: torch.Tensor  # shown, in host memory
    following: torch.Tensor  # memory for what is shown next
    pending: torch.Tensor  # added by averages, and not yet to the parameters; in the accumulation dtype
    taken: torch.Tensor  # memory for what is pending next
    device: torch.device  # of the parameters
    lock: threading.Lock = field(default_factory=threading.Lock)
    step: int = -1  # after which the values were shown, apart from averages since; -1 if nothing is shown
    has_pending: bool = False
    asked: Asked | None = None
    waiting: list[tuple[int, Frame]] = field(default_factory=list)  # questions, until this rank has its own reply
    made: list[Average] = field(default_factory=list)  # the averages in ``pending``
    have_asked: set[int] = field(default_factory=set)  # and so averaged with these values
    answered: Counter[int] = field(default_factory=Counter)  # bytes of replies by member, since it was last read


class PairAverager:
    """The averages of one rank; it lives as long as its model, across generations."""

    def __init__(self, world: ElasticWorld) -> None:
        self.num_steps = 0  # that have been shown
        self._world = world
        self._shown: dict[int, Shown] = {}
        self._making = threading.Lock()  # held while a bucket is shown for the first time
        run = partial(_answer_all, world.questions, weakref.ref(self))
        end = weakref.finalize(self, world.questions.put, None)
        daemon_threads.start(
            f"gossip-averages-{world.member}",
            run,
            end=end,
            failed=daemon_threads.weak_call(world, ElasticWorld.fail),
            patience=world.timeout,
        )

    # ------------------------------------------------------------------ used by the training thread

    def memory(self, bucket: int, like: torch.Tensor) -> torch.Tensor:
        """Return where the values that are shown next are to be written: in host memory, or ``like`` itself."""
        shown = self._shown_of(bucket, like)
        return shown.following if like.is_cpu else like

    def show(self, bucket: int, values: torch.Tensor, step: int, partner: int | None) -> int:
        """Show the values after step ``step``, and ask ``partner`` for an average; return how many bytes it is sent.

        While a reply is outstanding neither is done: the partner averages with what was shown before. A partner that
        has itself asked for an average with what was shown before is not asked. ``values`` are in :meth:`memory`, and
        must not be used after this.
        """
        self._world.mesh.check()
        shown = self._shown_of(bucket, values)
        if not values.is_cpu:
            shown.following.copy_(values)
        with shown.lock:
            self._end_if_lost(shown)
            if shown.asked is not None:
                return 0
            shown.values, shown.following = shown.following, shown.values
            if shown.has_pending:
                shown.values.add_(shown.pending)
            shown.step = step
            has_met, shown.have_asked = partner in shown.have_asked, set()
            if partner is None or has_met or partner in self._world.mesh.lost:
                return 0
            key = Key(Kind.PAIR, step, bucket)
            note("sent", self._world.member, partner, key, shown.values)
            frame = self._world.mesh.send(partner, key, shown.values)
            shown.asked = Asked(partner, step, frame)
            return shown.values.nbytes

    def wait(self, bucket: int, latest_step: int) -> None:
        """Wait for the reply to a question that was asked after step ``latest_step``, or before."""
        shown = self._shown.get(bucket)
        asked = None if shown is None else shown.asked
        if shown is None or asked is None or asked.step > latest_step:
            return
        self._world.wait_until(
            lambda: shown.asked is not asked or asked.member in self._world.mesh.lost,
            lambda: [asked.member],
            f"step {asked.step}, bucket {bucket}: average",
        )
        with shown.lock:
            self._end_if_lost(shown)

    def take(self, bucket: int, step: int, *, is_read: bool = False) -> torch.Tensor | None:
        """Return the sum of averages since the last call on the parameters' device, or None; valid until the next call.

        It enters the parameters before the update of ``step``, and ``is_read`` if the gradient of that step is still to
        be computed.
        """
        shown = self._shown.get(bucket)
        if shown is None:
            return None
        with shown.lock:
            if not shown.has_pending:
                return None
            shown.taken, shown.pending, shown.has_pending = shown.pending, shown.taken, False
            for average in shown.made:
                self._world.record(average._replace(entered=step, is_read=is_read))
            shown.made = []
            return shown.taken.to(shown.device)

    def held(self) -> list[torch.Tensor]:
        """Return the memory of what is shown, and of what averages have added."""
        names = "values", "following", "pending", "taken"
        return [getattr(shown, name) for shown in self._shown.values() for name in names]

    def answered(self, bucket: int) -> Counter[int]:
        """Return by member the bytes of replies that it was sent since the last call."""
        shown = self._shown[bucket]
        with shown.lock:
            found, shown.answered = shown.answered, Counter()
        return found

    def hide(self, bucket: int) -> None:
        """Refuse averages until values are shown again, and drop what has not been taken."""
        if (shown := self._shown.get(bucket)) is not None:
            with shown.lock:
                shown.step = -1
                shown.has_pending, shown.made = False, []

    def _shown_of(self, bucket: int, values: torch.Tensor) -> Shown:
        with self._making:
            if bucket not in self._shown:
                shown = torch.empty(2, *values.shape, dtype=values.dtype)
                pending = torch.empty(2, *values.shape, dtype=accumulation_dtype(values.dtype))
                self._shown[bucket] = Shown(shown[0], shown[1], pending[0], pending[1], values.device)
            return self._shown[bucket]

    # ------------------------------------------------------------------ questions and replies

    def answer(self, member: int, frame: Frame) -> None:
        """Make the average that a frame asks for, or complete the one to which it replies."""
        _, asked_at, bucket, shown_at = frame.key
        with self._making:  # a question of this rank must not overtake its refusal
            if (shown := self._shown.get(bucket)) is None:
                self._refuse(member, frame)
                return
        nbytes, is_refusal = shown.values.nbytes, frame.key.kind == Kind.AVERAGE and not frame.payload.nbytes
        if not is_refusal and not self._world.mesh.is_of_size(member, frame.key, frame.payload, nbytes):
            return
        with shown.lock:
            if frame.key.kind == Kind.PAIR:
                self._on_question(shown, member, frame)
            elif shown.asked is not None and (shown.asked.member, shown.asked.step) == (member, asked_at):
                if frame.payload.nbytes:
                    note("mixed", member, self._world.member, frame.key, frame.payload)
                    difference = frame.payload.view(shown.values.dtype)
                    self._add(shown, difference, -1.0)
                    shown.made.append(Average(self._world.member, shown.step, bucket, member, shown_at))
                self._end(shown)
        with self._world.mesh.changed:
            self._world.mesh.changed.notify_all()
        if frame.key.kind == Kind.AVERAGE:
            self._world.mesh.give_back([frame.payload])

    def _on_question(self, shown: Shown, member: int, frame: Frame) -> None:
        asked = shown.asked
        if asked is not None and asked.member == member:  # each of the two ranks gets the other's question
            asked.frame.copy()  # the rest of it may still be unsent
            self._average(shown, member, frame)
            self._world.mesh.give_back([frame.payload])
            self._end(shown)
        elif shown.step < 0 or (asked is not None and member < self._world.member):
            self._refuse(member, frame)
        elif asked is not None:
            shown.waiting.append((member, frame))
        elif (difference := self._average(shown, member, frame)) is None:
            self._refuse(member, frame)
        else:
            shown.have_asked.add(member)
            shown.answered[member] += difference.nbytes
            key = Key(Kind.AVERAGE, frame.key.first, frame.key.second, shown.step)
            note("sent", self._world.member, member, key, difference)
            self._world.mesh.send(member, key, difference)

    def _average(self, shown: Shown, member: int, frame: Frame) -> torch.Tensor | None:
        """Move half of the way to what another rank shows; return the difference, or None if it is not finite."""
        note("mixed", member, self._world.member, frame.key, frame.payload)
        difference = frame.payload.view(shown.values.dtype)
        is_finite = True
        for part in chunks(difference.numel(), difference.device):
            half = difference[part].to(shown.pending.dtype).sub_(shown.values[part]).mul_(0.5)
            is_finite = is_finite and finite_on_host([half])
            if half.dtype != difference.dtype:
                difference[part] = half
        _, step, bucket, _ = frame.key
        if not is_finite:
            logger.warning(
                f"rank {self._world.member}: step {shown.step}, bucket {bucket}: the difference between rank {member} "
                "and this rank is not finite; they do not average"
            )
            return None
        self._add(shown, difference, 1.0)
        shown.made.append(Average(self._world.member, shown.step, bucket, member, step))
        return difference

    def _add(self, shown: Shown, difference: torch.Tensor, sign: float) -> None:
        for part in chunks(difference.numel(), difference.device):
            change = difference[part]
            shown.values[part].add_(change, alpha=sign)
            if shown.has_pending:
                shown.pending[part].add_(change, alpha=sign)
            else:
                torch.mul(change, sign, out=shown.pending[part])
        shown.has_pending = True

    def _refuse(self, member: int, frame: Frame) -> None:
        self._world.mesh.send(member, Key(Kind.AVERAGE, frame.key.first, frame.key.second))
        self._world.mesh.give_back([frame.payload])

    def _end(self, shown: Shown) -> None:
        """Note that this rank has its reply, and answer the ranks that have waited for it."""
        shown.asked = None
        waiting, shown.waiting = shown.waiting, []
        for member, frame in waiting:
            self._on_question(shown, member, frame)

    def _end_if_lost(self, shown: Shown) -> None:
        asked = shown.asked
        if asked is not None and asked.member in self._world.mesh.lost:
            asked.frame.copy()
            self._end(shown)


def _answer_all(frames: Questions, reference: weakref.ReferenceType[PairAverager]) -> None:
    """Run the thread that replies, in the order in which the frames arrived."""
    with torch.no_grad():
        while (came := frames.get()) is not None and (averager := reference()) is not None:
            averager.answer(*came)
            del averager, came


class PairTransport(Transport):
    """Averages between members of a generation that do not make their steps together, see ``PairAverager``.

    An exchange asks for an average with the peer of a round; its result is what all averages have added to the bucket
    since the previous exchange, whoever asked for them.
    """

    def __init__(self, world: ElasticWorld, members: Sequence[int], averager: PairAverager, max_staleness: int) -> None:
        self._world, self.members = world, members
        self._place = members.index(world.member)
        self.averager, self.max_staleness = averager, max_staleness
        self._messages: dict[int, torch.Tensor] = {}

    def describe(self) -> str:
        return f"averages of two of {len(self.members)} ranks at a time, none of which waits for another's step"

    def memory(self, message: torch.Tensor, *, step: int, bucket: int) -> torch.Tensor:
        del step
        memory = self._messages[bucket] = self.averager.memory(bucket, message)
        return memory

    def rehearse(self, turn: Turn, round_: Round, device: torch.device, *, alike: bool) -> Sequence[torch.Tensor]:
        del round_, alike
        message = next(iter(turn.sent.values()))
        wide = torch.empty(2, *message.shape, dtype=accumulation_dtype(message.dtype), device="meta")
        return message if device.type == "cpu" else torch.empty_like(message), torch.empty_like(message), wide

    def held(self) -> list[torch.Tensor]:
        return self.averager.held()

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> PairExchange:
        _ = conversation.opening  # makes the message
        place = next(iter(round_.peers(self._place)), None)
        partner = None if place is None else self.members[place]
        num_bytes = self.averager.show(bucket, self._messages[bucket], step, partner)
        self.averager.num_steps = step + 1
        exchange = PairExchange(self, step, bucket)
        if num_bytes and partner is not None:
            exchange.count(partner, num_bytes)
        return exchange

    def late(self, bucket: int, *, waits: bool) -> Iterator[LateDifference]:
        """Yield, with ``waits``, what averages have added, once this rank has the reply to its own question."""
        if waits:
            self.averager.wait(bucket, latest_step=2**62)
            if (added := self.averager.take(bucket, self.averager.num_steps, is_read=True)) is not None:
                yield LateDifference(0, added)

    def drop(self, bucket: int) -> None:
        self.averager.wait(bucket, latest_step=2**62)
        self.averager.hide(bucket)


class PairExchange:
    """What averages add to a bucket in a step, see :class:`gossip.Exchange`."""

    def __init__(self, transport: PairTransport, step: int, bucket: int) -> None:
        self.bytes_by_peer: dict[int, int] = {}
        self.arrived_at: dict[int, float] = {}
        self._averager, self._members = transport.averager, transport.members
        self._bucket, self._step, self._latest_step = bucket, step, step + 1 - transport.max_staleness

    def count(self, member: int, num_bytes: int) -> None:
        """Count what was sent to a member, if it still is one."""
        if member in self._members:
            place = self._members.index(member)
            self.bytes_by_peer[place] = self.bytes_by_peer.get(place, 0) + num_bytes

    def wait(self) -> Arrival:
        self._averager.wait(self._bucket, self._latest_step)
        for member, num_bytes in self._averager.answered(self._bucket).items():
            self.count(member, num_bytes)
        added = self._averager.take(self._bucket, self._step + 1)
        return Arrival(iter(()), is_finite=True) if added is None else Arrival.of(added)
