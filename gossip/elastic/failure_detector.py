"""Waits for other ranks: a silent rank is suspected, then dropped at the time-out; a rank that itself waits is not."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from loguru import logger

from gossip.communication.world import World
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Key, Kind
from gossip.elastic.flag_votes import Position
from gossip.elastic.generations import Generation
from gossip.elastic.membership_consensus import Consensus
from gossip.elastic.membership_protocol import SILENT, RunningTime
from gossip.elastic.shard_group_world import MOST_TIMEOUTS
from gossip.errors import GenerationEndedError

_SUSPECTED = 0.25  # of the time-out
_TIMEOUTS_OF_A_LOST_MESSAGE = 2
_PRIMITIVES = 2**24  # per operation
_STEPS = 2**40


class FailureDetector(World):
    """The part of :class:`gossip.elastic.elastic_world.ElasticWorld` that waits for other ranks."""

    mesh: Mesh
    consensus: Consensus
    is_in_step: bool
    group_size: int
    _generation: Generation
    _num_primitives = 0
    _num_in_group = 0
    _awaited: tuple[float, Sequence[int]] = 0.0, ()

    @property
    def is_store_lost(self) -> bool:
        """Whether the key-value store does not reply."""
        return hasattr(self, "consensus") and self.consensus.store_monitor.is_lost

    @property
    def _others(self) -> list[int]:
        """The other ranks that take part in collective operations, at this rank's place in their shard groups."""
        return [member for member in self.members if member != self.member]

    def wait_until(
        self,
        look: Callable[[], bool],
        awaited: Callable[[], Sequence[int]],
        where: str,
        *,
        is_sent_at: Position | None = None,
        looks_again_at: float | None = None,
        looks_every_s: float | None = None,
        lets_train: bool = False,
    ) -> None:
        """Wait until ``look()`` returns True; it is called with the mesh's lock held. Can be interrupted by Ctrl-C.

        It is called whenever the mesh has something new, at ``looks_again_at`` (``time.monotonic()``), and every
        ``looks_every_s``. A member that is waited for longer than the time-out, and does not itself wait for any rank,
        is dropped. So is a member, after twice the time-out, that reports a position of at least ``is_sent_at``: what
        is awaited was sent before that, and is lost. After five times the time-out every awaited member is dropped.
        With ``lets_train``, members that have made a step within the time-out are waited for: they are on their way.

        Raises
        ------
        GenerationEndedError
            ``look`` has found that it never will be true.
        GossipError
            A thread that serves the other ranks has failed.
        """
        began, running = time.monotonic(), RunningTime(2 * self.mesh.beat_s)
        timeout_s, beat_s = self.timeout.total_seconds(), self.mesh.beat_s
        is_warned = False
        with self.mesh.changed, self.mesh.waits():
            while not look():
                self.mesh.check()
                missing = awaited()
                self._awaited = began, missing
                left = [member for member in missing if member in self.mesh.left and member in self.mesh.lost]
                if left:
                    self.consensus.miss(left)
                ahead_s = 0.0 if looks_again_at is None else looks_again_at - time.monotonic()
                self.mesh.changed.wait(min(looks_every_s or beat_s, ahead_s if ahead_s > 0 else beat_s))
                now = time.monotonic()
                waited_s = running.passed()
                if waited_s > timeout_s * _SUSPECTED:
                    suspects = [
                        member
                        for member in missing
                        if self._is_suspect(member, waited_s, is_sent_at)
                        and not (lets_train and now - self.mesh.stepped.get(member, (0, began))[1] <= timeout_s)
                    ]
                    if suspects and not is_warned:
                        is_warned = True
                        self._suspect(suspects, where, waited_s)
                    if suspects and waited_s > timeout_s:
                        why = f"{where}: rank {self.member} waited {waited_s:.3g} s for it"
                        self.consensus.give_up(dict.fromkeys(suspects, why))
            self._awaited = began, ()

    def awaits(self) -> tuple[float, list[int]]:
        """Return for how many seconds this rank has been waiting, and for which ranks; none if it does not. Local."""
        began, members = self._awaited
        return time.monotonic() - began, list(members)

    def fail(self, error: Exception) -> None:
        """Let the training thread raise an error of a thread that serves the other ranks. Local."""
        self.mesh.fail(error)

    def _suspect(self, members: Sequence[int], where: str, waited_s: float) -> None:
        heard = (f"rank {member} (last heard from {self.mesh.silent_s(member):.3g} s ago)" for member in members)
        logger.warning(
            "rank {}: {}: has waited {:.3g} s for {}; continuing without after {:g} s",
            self.member,
            where,
            waited_s,
            ", ".join(heard),
            self.timeout.total_seconds(),
        )

    def group_of(self, member: int) -> range:
        """Return the ranks that hold a replica together with ``member``, and ``member``. Local."""
        first = member - member % self.group_size
        return range(first, first + self.group_size)

    def _is_suspect(self, member: int, waited_s: float, is_sent_at: Position | None) -> bool:
        """Return whether a member itself is responsible for the wait, because it does not report that it waits.

        Nor does a rank of its shard group, for which it may wait, unless nothing is heard of the member at all. A rank
        that has joined waits a time-out for each step that the member makes before their first one together.
        """
        position, timeout_s = self.mesh.waits_at(member), self.timeout.total_seconds()
        if position is None:
            num_steps = self.consensus.steps_before_joining(member)
            if waited_s <= num_steps * timeout_s and self.mesh.silent_s(member) <= timeout_s * SILENT:
                return False
            group = self.group_of(member)
            is_own = self.member in group
            mates_wait = not is_own and any(self.mesh.waits_at(mate) is not None for mate in group)
            if not mates_wait or self.mesh.silent_s(member) > timeout_s * SILENT:
                return True
        num_timeouts = waited_s / timeout_s
        is_lost = is_sent_at is not None and position is not None and position >= is_sent_at
        return num_timeouts > (_TIMEOUTS_OF_A_LOST_MESSAGE if is_lost else MOST_TIMEOUTS)

    def exchange(
        self,
        sent: Mapping[int, torch.Tensor | None],
        what: str,
        sources: Sequence[int] | None = None,
        *,
        num_bytes: Mapping[int, int] | None = None,
        turn: int | None = None,
        in_group: bool = False,
    ) -> dict[int, torch.Tensor]:
        """Send to some members, and return by member what some (by default all) others send.

        A member that sends another number of bytes than ``num_bytes`` has for it is lost. Outside of collective
        operations, when ranks enter a generation together, such exchanges are numbered by ``turn``. Those ``in_group``,
        between the ranks of a shard group, are counted separately, as not all groups have the same ones.

        Raises
        ------
        GenerationEndedError
            A member was lost, or there is a later generation.
        """
        self._num_primitives += turn is None and not in_group
        self._num_in_group += in_group
        num_loaded, step, num_ended = self.consensus.position
        number = num_ended * _PRIMITIVES + (self._num_primitives if turn is None else _PRIMITIVES - turn)
        if in_group:
            number = num_ended * _PRIMITIVES + _PRIMITIVES // 2 + self._num_in_group
        key = Key(Kind.COLLECTIVE, self._generation.number, num_loaded * _STEPS + step, number)
        outgoing = {member: self.mesh.send(member, key, payload) for member, payload in sent.items()}
        found: dict[int, torch.Tensor] = {}
        awaited = self._others if sources is None else sources

        def unfinished() -> list[int]:
            unsent = (member for member, frame in outgoing.items() if not frame.has_ended)
            return list({*unsent, *(member for member in awaited if member not in found)})

        def look() -> bool:
            for member in awaited:
                payload = None if member in found else self.mesh.take(member, key)
                if payload is not None and (
                    num_bytes is None or self.mesh.is_of_size(member, key, payload, num_bytes[member])
                ):
                    found[member] = payload
            lost = [member for member in awaited if member not in found and member in self.mesh.lost]
            self.consensus.miss(lost)
            if lost or self.consensus.latest.number != self._generation.number:
                raise GenerationEndedError(what)
            return not unfinished()

        lets_train = self.is_joint or not self.is_in_step
        self.wait_until(look, unfinished, what, is_sent_at=(num_loaded, step, num_ended + 1), lets_train=lets_train)
        return found

    def exchange_in_group(self, payload: torch.Tensor | None, what: str) -> list[torch.Tensor | None]:
        """Return what each rank of the shard group sends, by its place there; None for this rank.

        Within a collective operation of all groups. Raises what :meth:`exchange` does.
        """
        group = self.group_of(self.member)
        mates = [mate for mate in group if mate != self.member]
        found = self.exchange(dict.fromkeys(mates, payload), what, mates, in_group=True)
        return [found.get(mate) for mate in group]
