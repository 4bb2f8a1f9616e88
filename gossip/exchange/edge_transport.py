"""Messages over a separate connection for every edge: what is lost is left out, and delays no other rank."""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from gossip.algorithms import Algorithm, Asynchronous
from gossip.communication.host import daemon_threads
from gossip.communication.shared_buffers import BUFFERS_PER_ROW
from gossip.communication.world import World
from gossip.compression.codec import Compression
from gossip.compression.conversation import Arrival, Conversation, Delivery, Messages, Parts, Turn
from gossip.elastic.connections.peer_connection import Key, Kind, Outgoing, next_number
from gossip.elastic.elastic_world import ElasticWorld
from gossip.exchange.late_messages import LateMessages
from gossip.exchange.message_notes import note
from gossip.exchange.pair_averaging import PairAverager, PairTransport
from gossip.exchange.recording import Missed
from gossip.exchange.transport import LateDifference, SoftDeadline, Transport
from topologies import Round, Topology

_MIN_SHARED_BYTES = 2**16  # below this size a frame is as fast


class EdgeTransport(Transport):
    """Messages between the members of one generation, each edge independent of the others.

    What has not arrived of a lost member is left out of the exchange, as if it had not been in the round. What the
    others send each other is mixed as usual, so if a round is undirected their mean is kept exactly.
    """

    num_buffers = BUFFERS_PER_ROW

    def __init__(
        self,
        world: ElasticWorld,
        members: Sequence[int],
        *,
        follows_up: bool,
        soft_deadline_s: SoftDeadline,
        before: Transport | None = None,
    ) -> None:
        self.world, self.members = world, members
        self._place = members.index(world.member)
        self._finisher = Finisher(world) if follows_up else None
        known = before.late_messages if isinstance(before, EdgeTransport) else None
        self.late_messages: LateMessages = LateMessages(world, soft_deadline_s, known)
        # With a soft deadline steps must not wait for readers of shared memory either.
        self.shared = world.shared if soft_deadline_s is None else None

    def describe(self) -> str:
        return f"separate connections between {len(self.members)} ranks, which may be lost"

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> EdgeExchange:
        exchange = EdgeExchange(self, conversation, round_.neighbours(self._place), step, bucket)
        if self._finisher is not None:
            exchange.end = self._finisher.submit(exchange.finish)
        return exchange

    def memory(self, message: torch.Tensor, *, step: int, bucket: int) -> torch.Tensor:
        shared = self.shared
        if shared is None or not message.is_cpu or message.nbytes < _MIN_SHARED_BYTES:
            return message
        return shared.take((bucket, "alike"), message, f"step {step}, bucket {bucket}")

    def rehearse(self, turn: Turn, round_: Round, device: torch.device, *, alike: bool) -> Sequence[torch.Tensor]:
        del round_
        near: dict[int, torch.Tensor] = {}
        for place, message in turn.sent.items():
            if self.shared is not None and message.nbytes >= _MIN_SHARED_BYTES:
                if alike and device.type == "cpu":
                    return (message,)
                if self.shared.reaches(self.members[place]):
                    near[id(message)] = torch.empty_like(message)
        _ = turn.receive_buffers
        return tuple(near.values())

    def held(self) -> list[torch.Tensor]:
        return [] if self.shared is None else self.shared.written

    def late(self, bucket: int, *, waits: bool) -> Iterator[LateDifference]:
        return self.late_messages.arrived(bucket, waits=waits)


class EdgeExchange:
    """Messages in flight between members of a generation, see :class:`gossip.Exchange`."""

    def __init__(
        self, transport: EdgeTransport, conversation: Conversation, sources: Mapping[int, float], step: int, bucket: int
    ) -> None:
        self.bytes_by_peer: dict[int, int] = {}
        self.arrived_at: dict[int, float] = {}
        self.dropped: set[int] = set()  # places whose messages were left out; complete after wait()
        self.delayed: set[int] = set()  # those of them whose messages are mixed in later
        self.end: Callable[[], None] | None = None  # waits for the thread that finishes it, if there is one
        self._late, self._shared = transport.late_messages, transport.shared
        self._world, self._members = transport.world, transport.members
        self._conversation, self._sources = conversation, sources
        self._step, self._bucket, self._where = step, bucket, f"step {step}, bucket {bucket}"
        self._is_sent_at = self._world.consensus.position[0], step + 1, 0
        self._num_turns, self._number = 0, next_number()
        self._outgoing: list[tuple[int, Outgoing]] = []
        self._payloads: list[torch.Tensor] = []
        self._opening, self._sent_at = conversation.opening, time.monotonic()
        self._send(self._opening)
        alike = max((message.nbytes for message in self._opening.sent.values()), default=0)
        for place in sources:
            self._world.mesh.expect(self._members[place], self._key(), alike)

    def finish(self) -> None:
        """Wait for the messages, and carry the exchange to its end."""
        ends_at = self._late.ends_at(self._bucket, self._sent_at, [self._members[place] for place in self._sources])
        received = self._receive(self._opening, tuple(self._sources), ends_at)
        for turn in self._conversation.proceed(Delivery(self._opening.sent, received)):
            self._send(turn)
            turn_received = self._receive(turn, tuple(turn.receive_buffers))
            for place, buffer in turn.receive_buffers.items():
                if place in turn_received:
                    buffer.copy_(turn_received[place])
            turn.lost = frozenset(self.dropped)
        self._await_sent(ends_at)

    def wait(self) -> Arrival:
        if self.end is None:
            self.finish()
        else:
            self.end()
        for place in sorted(self.dropped):
            self._world.record(Missed(self._world.member, self._step, self._bucket, self._members[place]))
        arrival = self._conversation.arrival
        return arrival._replace(parts=self._read(arrival.parts))

    def _read(self, parts: Parts) -> Iterator[tuple[slice, torch.Tensor]]:
        yield from parts
        self._world.mesh.give_back(self._payloads)
        self._payloads = []

    def _key(self) -> Key:
        return Key(Kind.MESSAGE, self._step, self._bucket, self._num_turns)

    def _send(self, turn: Turn) -> None:
        copies: dict[int, torch.Tensor] = {}
        key = self._key()
        for place, message in turn.sent.items():
            member, shared, lying = self._members[place], self._shared, message
            note("sent", self._world.member, member, key, message)
            is_near = shared is not None and message.nbytes >= _MIN_SHARED_BYTES and shared.reaches(member)
            if shared is not None and is_near and not shared.holds(message):
                if id(message) not in copies:
                    purpose = self._bucket, self._num_turns, len(copies)
                    copies[id(message)] = shared.take(purpose, message, self._where).copy_(message)
                lying = copies[id(message)]
            if shared is None or not shared.send(member, key, lying):
                frame = self._world.mesh.send(member, key, message.detach().cpu(), self._number)
                self._outgoing.append((member, frame))
            self.bytes_by_peer[place] = self.bytes_by_peer.get(place, 0) + message.nbytes

    def _receive(self, turn: Turn, sources: Sequence[int], ends_at: float | None = None) -> Messages:
        """Return the messages of a turn, in the memory in which they arrived, without those of lost members."""
        mesh, key = self._world.mesh, self._key()
        self._num_turns += 1
        found: dict[int, torch.Tensor] = {}
        missing = {self._members[place]: place for place in sources if place not in self.dropped}

        def look() -> bool:
            for member, place in list(missing.items()):
                payload = mesh.take(member, key)
                if payload is not None and mesh.is_of_size(
                    member, key, payload, self._expected(payload, turn, place).nbytes
                ):
                    found[place] = payload
                    self.arrived_at[place] = time.perf_counter()
                    self._late.note_arrival(self._bucket, member, self._sent_at)
                    del missing[member]
                elif member in mesh.lost and member not in mesh.left:
                    self.dropped.add(place)
                    del missing[member]
                elif ends_at is not None and time.monotonic() >= ends_at and self._puts_off(member, place, key):
                    del missing[member]
            return not missing

        self._world.wait_until(
            look, partial(list, missing), self._where, is_sent_at=self._is_sent_at, looks_again_at=ends_at
        )
        messages = {place: self._kept(payload, turn, place) for place, payload in found.items()}
        for place, message in messages.items():
            note("mixed", self._members[place], self._world.member, key, message)
        return messages

    def _puts_off(self, member: int, place: int, key: Key) -> bool:
        """Return whether a message is mixed in later, when it arrives."""
        own = next(iter(self._opening.sent.values()))
        if not self._late.await_later(self._bucket, member, key, self._sources[place], own, self._sent_at):
            return False
        self.dropped.add(place)
        self.delayed.add(place)
        return True

    def _kept(self, payload: torch.Tensor, turn: Turn, place: int) -> torch.Tensor:
        """Return a message in place, if that is this rank's own memory or it is only read; otherwise a copy."""
        like, shared = self._expected(payload, turn, place), self._shared
        message = payload.view(like.dtype).view(like.shape).to(like.device)
        # The codec's messages are plain values.
        reads_only = shared is None or any(map(shared.holds, turn.sent.values()))
        if not reads_only and shared is not None and shared.is_lent(payload):
            message = turn.receive_buffers[place].copy_(message)
            self._world.mesh.give_back([payload])
        else:
            self._payloads.append(payload)
        return message

    def _expected(self, payload: torch.Tensor, turn: Turn, place: int) -> torch.Tensor:
        """Return a tensor like the message that a payload must be."""
        like = next(iter(turn.sent.values()), None)
        if like is None or like.nbytes != payload.nbytes or turn is not self._opening:
            like = turn.receive_buffers[place]
        return like

    def _await_sent(self, ends_at: float | None) -> None:
        """Wait until the sent messages are no longer read, because their memory is reused for the next exchange."""

        def unsent() -> list[int]:
            return [member for member, frame in self._outgoing if not frame.has_ended]

        self._world.wait_until(
            lambda: not unsent() or (ends_at is not None and time.monotonic() >= ends_at),
            unsent,
            f"{self._where}: sending",
            looks_again_at=ends_at,
        )
        for _, frame in self._outgoing if ends_at is not None else ():
            frame.copy()  # it may still be unsent
        self._outgoing = []


class Finisher:
    """A thread in which exchanges proceed in the order in which they were started; it ends after the last of them."""

    def __init__(self, world: ElasticWorld) -> None:
        self._exchanges: _Unfinished = queue.SimpleQueue()
        end = weakref.finalize(self, self._exchanges.put, None)
        daemon_threads.start(
            f"gossip-exchanges-{world.member}",
            partial(_finish, self._exchanges),
            end=end,
            failed=daemon_threads.weak_call(world, ElasticWorld.fail),
            patience=world.timeout,
        )

    def submit(self, finish: Callable[[], None]) -> Callable[[], None]:
        """Finish an exchange after the previous ones; return what waits for that, and raises what it raised."""
        outcome: Future[None] = Future()
        self._exchanges.put((finish, outcome))
        return outcome.result


_Unfinished = queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]


def _finish(exchanges: _Unfinished) -> None:
    while (entry := exchanges.get()) is not None:
        finish, outcome = entry
        try:
            outcome.set_result(finish())
        except BaseException as error:
            outcome.set_exception(error)


def make_generation_transport(
    world: World,
    schedule: Topology,
    *,
    algorithm: Algorithm,
    compression: Compression,
    soft_deadline_s: SoftDeadline,
    members: Sequence[int] | None = None,
    before: Transport | None = None,
) -> Transport:
    """Return the transport of a generation; by default, of the first one."""
    assert isinstance(world, ElasticWorld)
    if members is None:
        members = world.holding_shard(range(schedule.world_size * world.group_size))
    if isinstance(algorithm, Asynchronous):
        averager = before.averager if isinstance(before, PairTransport) else PairAverager(world)
        return PairTransport(world, members, averager, algorithm.max_staleness)
    follows_up = (algorithm.compression or compression).follows_up
    return EdgeTransport(world, members, follows_up=follows_up, soft_deadline_s=soft_deadline_s, before=before)
