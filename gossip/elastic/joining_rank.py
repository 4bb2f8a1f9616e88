"""How a process becomes a rank of a running training: it takes a state, asks to be admitted, and is admitted.

The ranks of a shard group join together: each takes its shard from the same place of one group, of the same step.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Sequence

from loguru import logger

from gossip.communication import training_store
from gossip.communication.host.available_memory import ShrinkingMemory
from gossip.elastic.connections.mesh import in_words
from gossip.elastic.elastic_world import ElasticWorld
from gossip.elastic.generations import Generation
from gossip.elastic.shard_group_world import ShardGroupWorld
from gossip.elastic.state_transfer import let_go, step_of, take_state
from gossip.errors import CannotJoinError, ExchangeError

_PAUSE_S = 0.005
_STEPS_AHEAD = 3, 12, 48
"""So many steps later than now a shard group gives its state; all of its ranks must have been asked by then."""


class JoiningRank:
    """A rank that is about to join the others, which continue training.

    One that ``returns`` is within its loop, at the end of a step, and not before its loop.
    """

    def __init__(self, world: ElasticWorld, *, returns: bool) -> None:
        world.agree()
        self._returns = returns
        self._world, self._consensus, self._mesh = world, world.consensus, world.mesh

    def take_state(self) -> tuple[int, str, ShrinkingMemory]:
        """Connect to all ranks that train, and return the state of one of them: its rank, text and values.

        Raises
        ------
        CannotJoinError
            The training has ended, or each of its ranks says that it cannot give its state.
        ExchangeError
            No rank can be reached, or gives its state.
        """
        self._consensus.look_up()
        members = self._reach(self._consensus.latest)
        if self._world.shard_group is not None:
            return self._take_with_group(members, self._world.shard_group)
        first = self._world.member % len(members)
        at_step_end = self._returns or self._world.is_in_step
        return take_state(self._mesh, members[first:] + members[:first], at_step_end=at_step_end, returns=self._returns)

    def _take_with_group(self, members: Sequence[int], group: ShardGroupWorld) -> tuple[int, str, ShrinkingMemory]:
        """Let each rank of this shard group take its shard from the same place of one group, and of the same step."""
        world, what = self._world, "joining: choosing whose state to take"
        complete = {each // len(held) for each in members if set(held := world.group_of(each)).issubset(members)}
        found = [json.loads(each) for each in group.gather_bytes(json.dumps(sorted(complete)).encode(), what)]
        sources = sorted(set.intersection(*map(set, found)))
        if not sources:
            raise ExchangeError(f"rank {world.member}: joining: no shard group can be reached by all ranks of this one")
        first, reasons = world.worker % len(sources), list[str]()
        for source, num_steps in itertools.product(sources[first:] + sources[:first], _STEPS_AHEAD):
            given_at = 0
            if group.rank == 0:
                with contextlib.suppress(ExchangeError):
                    given_at = num_steps + step_of(self._mesh, source * world.group_size)
            given_at = int(group.gather_bytes(str(given_at).encode(), what)[0])
            taken, outcome = None, f"rank {source * world.group_size} did not say at which step it is"
            if given_at:
                try:
                    place = source * world.group_size + group.rank
                    taken = take_state(self._mesh, [place], at_step_end=True, returns=False, at_step=given_at)
                    outcome = ""
                except ExchangeError as error:
                    outcome = str(error)
            outcomes = [each.decode() for each in group.gather_bytes(outcome.encode(), what)]
            if not any(outcomes):
                assert taken is not None
                return taken
            if taken is not None:
                let_go(self._mesh, taken[0])
            reasons.append(next(filter(None, outcomes)))
        raise ExchangeError("; ".join(reasons))

    def be_admitted(self, source: int, check_size: Callable[[int], None]) -> Generation | None:
        """Join, and return the first generation of which this rank is a member; it makes steps from its first one on.

        None if it needs a new state: the others continue without ``source``, whose state it has and who is to give the
        second part of it, or they do not make their steps together, and could admit this rank only at a time other than
        that of its state. ``check_size`` is called with the number of ranks that there would be, before this rank asks
        to be one of them, and raises if so many cannot train together.
        """
        member, timeout_s, has_asked = self._world.member, self._world.timeout.total_seconds(), False
        began = reached_at = time.monotonic()
        checked: Generation | None = None
        while True:
            latest = self._consensus.latest
            if (admitted := self._consensus.admitted_in) is not None:
                return admitted
            is_refused = has_asked and not self._world.is_in_step and not self._consensus.asks
            if is_refused or source not in latest.members:
                return None
            self._consensus.look_up()
            found = self._reach(latest)
            if len(found) == len(latest.members):
                reached_at = time.monotonic()
                if checked != latest:
                    check_size(len(latest.members) // self._world.group_size + 1)
                    checked = latest
                self._consensus.ask_in(latest.number, returns=self._returns)
                has_asked = True
            # The others lose within a time-out whom this rank cannot reach; if they do not, it needs new connections,
            # with which one that returns tries again.
            ends_at = began + 2 * timeout_s
            if time.monotonic() > (min(ends_at, reached_at + timeout_s) if self._returns else ends_at):
                missing = [f"rank {other}: {self._reason(other)}" for other in latest.members if other not in found]
                raise ExchangeError(
                    f"rank {member}: joining: {in_words(latest.members)} did not admit this rank within "
                    f"{time.monotonic() - began:.3g} s; not connected: {'; '.join(missing) or 'none'}"
                )
            time.sleep(_PAUSE_S)

    def _reach(self, generation: Generation) -> list[int]:
        """Connect to all members of a generation that this rank is not in, and return those that are connected.

        A member that cannot be reached will soon be lost for the others too; otherwise this rank cannot join.
        """
        mesh, members, own = self._mesh, generation.members, self._world.member
        mates = [mate for mate in self._world.group_of(own) if mate != own]
        called = [*members, *(mate for mate in mates if mate < own)]
        mesh.call({other: self._world.address_of(other) for other in called if not mesh.has_met(other)})
        with mesh.changed:
            mesh.changed.wait_for(
                lambda: mesh.failure is not None or all(map(mesh.has_met, [*members, *mates])),
                timeout=self._world.timeout.total_seconds(),
            )
            mesh.check()
            found = [other for other in members if mesh.has_met(other) and other not in mesh.lost]
            have_ended = mesh.ended.issuperset(members)
        if not found:
            whom = f"rank {self._world.member}: joining: {in_words(members)} cannot be reached"
            if have_ended and not self._returns and training_store.has_outcome(training_store.COMPLETED):
                logger.info("{}, since the training is complete: there is nothing left to do", whom)
                raise SystemExit(0)
            if have_ended:
                training_store.note_outcome(training_store.ENDED)
                raise CannotJoinError(f"{whom}: the training has ended ({self._reason(members[0])})")
            why = f"they were lost, or this machine has no route to them ({self._reason(members[0])})"
            raise ExchangeError(f"{whom}: {why}")
        return found

    def _reason(self, other: int) -> str:
        return self._mesh.lost.get(other, "it does not reply")
