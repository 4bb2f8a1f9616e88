"""Which topologies are another one in disguise, told by their rounds."""

import itertools

import pytest

import topologies
from topologies import Round, Topology
from topologies.reports.comparing import chosen_topologies
from topologies.reports.family_samples import title_of, without_disguises

PAIRS = (Round.from_groups(4, [(0, 1), (2, 3)]), Round.from_groups(4, [(0, 2), (1, 3)]))
EMPTY = Round.identity(4)


def kept(*candidates: Topology) -> list[int]:
    """The places of the candidates that stay."""
    found = without_disguises(candidates)
    return [place for place, candidate in enumerate(candidates) if any(candidate is each for each in found)]


def test_empty_rounds_do_not_make_a_topology() -> None:
    plain = Topology.from_rounds(PAIRS)
    for rounds in ([EMPTY, *PAIRS], [PAIRS[0], EMPTY, PAIRS[1]], [*PAIRS, EMPTY, *PAIRS]):
        assert kept(Topology.from_rounds(rounds), plain) == [1]
    assert len(kept(Topology.from_rounds([*PAIRS, *PAIRS]), plain)) == 1
    assert kept(plain.every(3), plain.every(2)) == [1]
    assert kept(plain, Topology.from_rounds([EMPTY])) == [0, 1]


def test_other_rounds_another_order_or_other_weights_are_another_topology() -> None:
    plain = Topology.from_rounds(PAIRS)
    half = Round.from_edges(4, [0, 1, 2, 3], [1, 0, 3, 2], 0.25)
    others = [PAIRS[::-1], PAIRS[:1], [*PAIRS, PAIRS[1]], [half, PAIRS[1]]]
    assert kept(plain, *map(Topology.from_rounds, others)) == [0, 1, 2, 3, 4]


def test_random_rounds_that_leave_nothing_to_chance() -> None:
    complete, matching, other = (topologies.build(name, 2) for name in ("complete", "random_matching", "equi_dyn"))
    activated = topologies.build("matcha", 2, graph="ring")  # the only edge, or none
    assert kept(matching, activated, complete, other) == [2, 3]
    seeds = [topologies.build("random_matching", 6, seed=seed) for seed in (0, 1, 0)]
    assert kept(*seeds) == [0, 1]


def test_a_warmup_is_not_taken_for_a_disguise() -> None:
    complete, ring = topologies.build("complete", 5), topologies.build("ring", 5)
    assert kept(complete.then(ring, after=10), ring, complete) == [0, 1, 2]


def test_the_plainest_name_stays() -> None:
    names = {
        n: [title_of(each) for each in without_disguises(chosen_topologies(None, n, local_size))]
        for n, local_size in ((2, 1), (4, 4))
    }
    assert names[2] == ["equi_dyn", "one_peer_exponential"]  # the default, of those without options
    assert {"complete", "one_peer_hypercube", "one_peer_ring", "hypercube"} <= set(names[4])
    assert not {"base (k=3)", "de_bruijn (p=4)", "grid (shape=(2, 2))", "local_global (local_size=4)"} & set(names[4])


@pytest.mark.parametrize("n", [5, 8])
def test_what_stays_differs_and_what_goes_is_there(n: int) -> None:
    def exchanges(topology: Topology) -> list[list[list[float]]]:
        rounds = (topology.round(t) for t in range(400))
        return [
            each.matrix().round(9).tolist() for each in itertools.islice((r for r in rounds if not r.is_identity), 16)
        ]

    candidates = [each for each in chosen_topologies(None, n, 1) if each.period is not None]
    found = without_disguises(candidates)
    staying = [exchanges(each) for each in found]
    assert all(staying.count(each) == 1 for each in staying)
    assert all(exchanges(each) in staying for each in candidates)
