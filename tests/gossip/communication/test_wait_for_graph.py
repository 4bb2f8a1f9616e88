"""From who waits for whom to the rank that stopped."""

from collections.abc import Sequence

import pytest

from gossip.communication.liveness.process_liveness import GONE, SUSPENDED
from gossip.communication.liveness.wait_for_graph import Arrival, Sighting, Verdict, find_blocking_ranks

SEQUENCE = 7


def waits(*ranks: int, where: str = "step 5, bucket 0", is_fresh: bool = True) -> Sighting:
    return Sighting(Arrival(SEQUENCE, "starting", waits_in=where, waits_for=ranks, beat=3), is_fresh=is_fresh)


def gave_up(*ranks: int) -> Sighting:
    reason = f"rank {ranks[0]} is gone" if ranks else ""
    return Sighting(Arrival(SEQUENCE, "starting", gave_up=True, blames=ranks, reason=reason), is_fresh=True, state=GONE)


def busy(sequence: int = SEQUENCE, state: str = "") -> Sighting:
    return Sighting(Arrival(sequence, "starting"), state=state, pid=4711)


def verdict(*others: Sighting, awaited: Sequence[int] = (1,), is_collective: bool = False) -> Verdict:
    """Of rank 0; ``others`` are ranks 1, 2, ..."""
    return find_blocking_ranks(
        0, "step 5, bucket 0", awaited, dict(enumerate(others, 1)), sequence=SEQUENCE, is_collective=is_collective
    )


ABSENT = "is absent (dead, frozen, cut off or busy)"
HOPS = "(rank 1 waits for rank 2 in step 5, bucket 0, rank 2 waits for rank 3 in step 5, bucket 0)"


@pytest.mark.parametrize(
    ("last", "text", "is_certain"),
    [
        (busy(), f"rank 3 {ABSENT} {HOPS}", False),
        (
            busy(state=SUSPENDED),
            f"rank 3 is frozen: its process 4711 is suspended (SIGSTOP, or a debugger) {HOPS}",
            True,
        ),
        (busy(state=GONE), f"rank 3 is gone: its process 4711 has ended {HOPS}", True),
        (waits(0, is_fresh=False), f"rank 3 {ABSENT} {HOPS}", False),
        (busy(SEQUENCE + 1), f"rank 3 {ABSENT}; it is now in 'starting' {HOPS}", False),
        (Sighting(None), f"rank 3 {ABSENT}; it was never seen {HOPS}", False),
    ],
)
def test_chain_ends_at_the_rank_that_waits_for_nobody(last: Sighting, text: str, is_certain: bool) -> None:
    found = verdict(waits(2), waits(3), last)
    assert found == Verdict((3,), text, is_certain)


def test_rank_outside_the_chain_is_left_alone() -> None:
    assert verdict(busy(), busy(state=GONE)).failed_ranks == (1,)


def test_what_a_rank_that_gave_up_had_found_is_passed_on_though_it_is_gone_by_now() -> None:
    found = verdict(gave_up(2), busy())
    assert (found.failed_ranks, found.text) == ((2,), "rank 2 is gone (so rank 1 found)")
    assert found.ends_wait
    assert verdict(waits(2), gave_up(3), busy()).failed_ranks == (3,)


def test_rank_that_is_blamed_itself_blames_nobody() -> None:
    assert verdict(gave_up(0)).failed_ranks == ()


def test_in_a_collective_those_who_have_not_arrived_are_absent() -> None:
    ranks = (1, 2, 3)
    found = verdict(busy(), busy(SEQUENCE - 1), waits(1, 2), awaited=ranks, is_collective=True)
    assert found.text == f"rank 2 {ABSENT}; it was last seen in 'starting'"
    assert verdict(busy(), busy(), waits(1, 2), awaited=ranks, is_collective=True).failed_ranks == (1, 2)


@pytest.mark.parametrize(("sequence", "ends_wait"), [(SEQUENCE - 1, True), (SEQUENCE, False)])
def test_what_was_sent_before_a_process_ended_may_still_come(sequence: int, ends_wait: bool) -> None:
    found = verdict(busy(sequence, GONE), is_collective=True)
    assert found.failed_ranks == (1,)
    assert found.ends_wait == ends_wait


def test_cycle_is_said_to_be_one() -> None:
    found = verdict(waits(2), waits(0, where="the sum"))
    assert found == Verdict((), "they wait for each other: rank 2 is now in the sum")
    assert verdict(waits(2), waits(0)).text == "all others are waiting too; a connection between two of them is cut"
