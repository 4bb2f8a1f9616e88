"""Who is left is agreed on in a store, whoever notices first, and whoever is lost meanwhile."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gossip import ExchangeError
from gossip.elastic.connections.peer_connection import Frame, Key, Kind
from gossip.elastic.generations import Generation
from gossip.elastic.membership_consensus import Consensus

TIMEOUT = timedelta(seconds=60)
SIZE = 5


class Wires:
    """What agreements need of a mesh, between threads."""

    def __init__(self, member: int, all_wires: "list[Wires]") -> None:
        self.member = member
        self.changed = threading.Condition()
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self.farewells: dict[int, tuple[int, int, int]] = {}
        self.silent: set[int] = set()
        self.waits: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.beat_s, self.woke_at, self.looked_at = 0.5, float("-inf"), float("inf")
        self.thawed = collections.defaultdict[int, float](lambda: float("-inf"))
        self.on_lost: Callable[[int, str], None] = lambda *_: None
        self.handlers: dict[Kind, Callable[[int, Frame], None]] = {}
        self._all = all_wires

    def has_met(self, _: int) -> bool:
        return True

    def silent_s(self, member: int) -> float:
        return 60.0 if member in self.silent else 0.0

    def send(self, member: int, key: Any, _: Any = None) -> None:
        if member not in self.lost:
            self._all[member].handlers[key.kind](self.member, Frame(key, torch.empty(0)))

    def cut(self, member: int, reason: str) -> None:
        if member not in self.lost:
            self.lose(member, reason)
            self._all[member].lose(self.member, "the connection was closed")

    def lose(self, member: int, reason: str = "the connection was closed") -> None:
        self.lost.setdefault(member, reason)
        self.on_lost(member, reason)


class Members:
    """Agreements of threads; ``stop`` ends one like a death does."""

    def __init__(
        self,
        stores: list[dist.Store],
        min_ranks: int = 2,
        timeout: timedelta = TIMEOUT,
        *,
        num_initial: int | None = None,
        **options: Any,
    ) -> None:
        self.wires: list[Wires] = []
        self.wires += [Wires(member, self.wires) for member in range(len(stores))]
        members = range(len(stores) if num_initial is None else num_initial)
        self.agreements: list[Any] = [
            Consensus(store, wires, members, min_ranks=min_ranks, timeout=timeout, **options)  # type: ignore[arg-type]
            for store, wires in zip(stores, self.wires, strict=True)
        ]

    def __getitem__(self, member: int) -> Consensus:
        consensus: Consensus = self.agreements[member]
        return consensus

    def die(self, *dead: int, seen_by: list[int] | None = None) -> None:
        for member in dead:
            self[member].close()
        for member, wires in enumerate(self.wires):
            for other in dead if member not in dead and (seen_by is None or member in seen_by) else ():
                wires.lose(other)

    def generations_after(self, number: int, members: list[int]) -> set[Generation]:
        with ThreadPoolExecutor(len(members)) as pool:
            return set(pool.map(lambda member: self[member].wait_for_generation_after(number), members))

    def told_after(self, number: int, members: list[int]) -> set[tuple[int, tuple[int, ...], int]]:
        """Number, members and first step of the generations."""
        return {
            (generation.number, generation.members, generation.first_step)
            for generation in self.generations_after(number, members)
        }

    def close(self) -> None:
        for consensus in self.agreements:
            consensus.close()


@pytest.fixture(params=["tcp", "file", "hash"])
def members(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Members]:
    stores: list[dist.Store] = [dist.HashStore()] * SIZE
    if request.param == "file":
        stores = [dist.FileStore(str(tmp_path / "store"), SIZE) for _ in range(SIZE)]
    elif request.param == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores = [store, *(dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(SIZE - 1))]
    made = Members(stores)
    yield made
    made.close()


@contextlib.contextmanager
def in_memory(size: int = SIZE, **arguments: Any) -> Iterator[Members]:
    made = Members([dist.HashStore()] * size, **arguments)
    yield made
    made.close()


def test_all_who_are_left_agree(members: Members) -> None:
    for member in range(SIZE):
        assert members[member].enter_step(member) == Generation(0, tuple(range(SIZE)))
    members.die(2)
    assert members.told_after(0, [0, 1, 3, 4]) == {(1, (0, 1, 3, 4), 5)}


def test_an_alarm_about_what_nobody_has_proposed_is_dismissed() -> None:
    with in_memory() as members:
        members.wires[0].handlers[Kind.ALARM](1, Frame(Key(Kind.ALARM, 2**40), torch.empty(0)))
        assert members[0].enter_step(1).number == 0
        members.die(3)
        assert members.told_after(0, [0, 1, 2, 4]) == {(1, (0, 1, 2, 4), 2)}


def test_steps_belong_to_the_newest_generation_that_has_begun_by_then() -> None:
    with in_memory() as members:
        for member, step in enumerate((3, 7, 4, 7, 0)):
            members[member].enter_step(step)
        members.die(4)
        (first,) = members.generations_after(0, [0, 1, 2, 3])
        assert first.first_step == 8
        assert [members[0].enter_step(step).number for step in (4, 7)] == [0, 0]
        members.die(3)
        (second,) = members.generations_after(first.number, [0, 1, 2])
        assert second.first_step == 8
        assert [members[0].enter_step(8).number, members[1].enter_step(8).number] == [second.number] * 2
        assert members[0].enter_step(2).number == second.number  # a checkpoint of an earlier step


def test_a_rank_that_is_about_to_rejoin_does_not_have_others_dropped_from_whom_it_parts() -> None:
    with in_memory(3) as members:
        stores: list[Any] = [members[member]._consensus_store for member in range(3)]
        vote, without_vote = stores[1].vote, stores[0].without_vote
        may_vote, looks = threading.Event(), list[int]()
        stores[1].vote = lambda *args: may_vote.wait(60) and vote(*args)
        stores[0].without_vote = lambda *args: looks.append(0) or without_vote(*args)
        members.die(2)
        while not looks:
            time.sleep(0.001)
        members[0].fail(ExchangeError("its state is that of none of the others"))
        members.wires[0].lose(1, "this rank is about to rejoin")
        looks.clear()
        while len(looks) < 3 and not stores[0].is_decided(1):
            time.sleep(0.001)
        assert not stores[0].is_decided(1)
        may_vote.set()
        assert members.told_after(0, [1]) == {(1, (0, 1), 1)}


def test_who_has_lost_others_makes_no_step_before_the_agreement_begins() -> None:
    with in_memory(3, timeout=timedelta(seconds=0.2)) as members:
        members[0].close()  # its thread is late
        members.wires[0].lose(1)
        with pytest.raises(ExchangeError, match=r"^rank 0: step 3: no agreement on the remaining ranks within 0\.4 s"):
            members[0].enter_step(3)
        with pytest.raises(ExchangeError, match="no agreement"):  # for good: one that came now would come too late
            members[0].check()


def test_who_is_admitted_just_before_a_loss_begins_where_the_others_wait_for_it() -> None:
    with in_memory(4, num_initial=3) as members:
        for member in range(3):
            members[member].enter_step(7)
        members[3].ask_in(0)
        assert members.told_after(0, [0, 1, 2, 3]) == {(1, (0, 1, 2, 3), 8)}
        members.die(2)
        members.generations_after(1, [0, 1, 3])
        assert members[3].latest.members == (0, 1, 3)
        admitted = members[3].admitted_in
        assert (admitted.number, admitted.first_step, members[3].enter_step(8).number) == (1, 8, 1)


def test_who_is_lost_because_of_a_frozen_rank_of_its_shard_group_does_not_have_the_others_dropped_first() -> None:
    with in_memory(6, min_ranks=1, group_size=2) as members:
        members.wires[3].silent.add(2)
        members.wires[3].lose(4, "the connection was closed")  # by rank 4, which tells the others later
        members[2].close()
        members[4].give_up({3: "waited for it", 2: "heard nothing from it"})
        assert members.told_after(0, [0, 1, 4, 5]) == {(1, (0, 1, 4, 5), 1)}


def test_who_has_failed_cuts_its_connections_without_proposing_anything() -> None:
    with in_memory() as members:
        members[0].fail(ExchangeError("its values are wrong"))
        members.wires[0].lose(3)
        members[0]._attempt(1)  # as its thread would
        members.die(0, seen_by=[2])
        assert members.told_after(0, [1, 2, 3, 4]) == {(1, (1, 2, 3, 4), 1)}


def test_one_that_takes_no_part_does_not_end_it_by_being_ahead() -> None:
    with in_memory() as members:
        start = members[0].latest
        members[3].enter_step(1)
        members.die(4)
        members.generations_after(0, [0, 1, 2, 3])
        assert not any(members[member].commit(start, (0, 1, 2, 4)) for member in (0, 1, 2))
        assert members[0].commit(start, start.members)


def test_who_waits_for_others_hears_that_one_of_them_has_ended_it() -> None:
    """They may all have gone since, and agree on nothing any more."""
    with in_memory(3, timeout=timedelta(seconds=0.2)) as members:
        members[0].close()  # its thread agrees on nothing either
        members.wires[0].lose(2)
        start, wires = members[0].latest, members.wires[0]

        def have_passed() -> bool:
            return members[0].have_passed(start.members)

        @contextlib.contextmanager
        def waits() -> Iterator[None]:
            wires.farewells[1] = (0, 0, 1)
            yield
            wires.farewells.clear()

        wires.waits = waits
        assert members[0].wait_for_generation_after(0, unless=have_passed) == start
        assert members[0].commit(start, start.members)


@pytest.mark.parametrize("is_joint", [False, True])
def test_who_leaves_exchanges_along_the_same_topology_as_the_others_to_the_end(is_joint: bool) -> None:
    """What these do together, it does not: a generation that they begin then must not be one in which it exchanges."""
    with in_memory(4) as members:
        for member, step in enumerate((3, 3, 2)):
            members[member].enter_step(step)
        members.die(3)
        (lost,) = members.generations_after(0, [0, 1, 2])
        members[0].is_joint = is_joint
        assert members[2].leave() == (3 if is_joint else 4)
        (left,) = members.generations_after(lost.number, [0, 1])
        assert members[1].newest_that_begins(left.number).number == (left.number if is_joint else 0)


def test_without_a_store_nobody_goes_on() -> None:
    class Gone:
        def check(self, *_: object) -> bool:
            raise dist.DistStoreError("it is gone")

        compare_set = check

    with in_memory(3) as members:
        for member in range(3):
            members[member]._consensus_store.store = Gone()
        members.die(2)
        with pytest.raises(ExchangeError, match=r"the key-value store does not reply \(it is gone\)"):
            members[0].wait_for_generation_after(0)


def test_who_said_goodbye_is_missed_only_where_somebody_waits_for_him() -> None:
    with in_memory(4) as members:
        for member in (0, 1, 2):
            members.wires[member].left.add(3)
        members.die(3)
        assert members[0].enter_step(1).number == 0
        assert not any(members[member]._is_due() for member in (0, 1, 2))
        members[1].miss([3])
        assert members.told_after(0, [0, 1, 2]) == {(1, (0, 1, 2), 2)}


@pytest.mark.parametrize(
    ("busy", "positions", "is_let_in"),
    [
        (None, [(0, 0, 2)] * 4, True),
        (1, [(0, 0, 2)] * 4, False),
        (None, [(0, 0, 2)] * 3 + [(0, 0, 1)], False),
        (None, [(0, 0, 2), (0, 0, 3), (0, 0, 2), (0, 0, 2)], False),
        (None, [(1, 0, 0)] * 3 + [(0, 0, 4)], False),
    ],
    ids=["between", "one-is-in-the-midst", "it-has-an-older-state", "one-has-ended-more", "others-have-loaded"],
)
def test_ranks_that_are_not_in_step_let_others_in_between_what_all_do_together(
    busy: int | None, positions: list[tuple[int, int, int]], is_let_in: bool
) -> None:
    """Else a joining rank would miss what the others are just doing together, or do it once more."""
    with in_memory(4, num_initial=3, is_in_step=False) as members:
        for member, position in enumerate(positions):
            members[member].position = position
            members[member].is_joint = member == busy
        members[3].ask_in(0)
        with members[3]._changed:
            assert members[3]._changed.wait_for(lambda: not members[3].asks, 60)
        assert members[3].latest.members == ((0, 1, 2, 3) if is_let_in else (0, 1, 2))
        if not is_let_in:  # and nobody is held up by it
            for member in range(4):
                members[member].position, members[member].is_joint = (0, 0, 2), False
            assert [members[member].enter_step(5).number for member in range(3)] == [0, 0, 0]
            members[3].ask_in(0)
        (joined,) = members.generations_after(0, [0, 1, 2, 3])
        assert joined.members == (0, 1, 2, 3)
        assert not joined.has_first_steps


def test_a_generation_begins_no_sooner_than_ranks_that_are_still_leaving_have_agreed_on() -> None:
    """Rank 2 had made most steps when it was agreed that it leaves, and makes its last ones when the next one is."""
    leaving = Generation(1, (0, 1), first_step=3, has_first_steps=True, left=(2,))
    positions = [(member, (0, 1, 0)) for member in (0, 1)]
    after = leaving.followed_by(2, [0, 1], [], [2], positions, begun=None, is_in_step=True)
    assert (after.first_step, after.has_first_steps, after.left) == (3, True, (2,))
