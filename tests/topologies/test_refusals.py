"""Whatever is asked for is built or refused at once: absurd sizes and options cost neither minutes nor memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import topologies
from topologies import Round, Topology
from topologies.families.uniform_groups import fewest_factors
from topologies.integers import divisors
from topologies.validation import MAX_WORLD_SIZE

pytestmark = pytest.mark.timeout(15)

BILLION = 10**9


@pytest.mark.parametrize(
    ("name", "world_size", "options", "nearest"),
    [
        ("hypercube", BILLION, {}, (1 << 29, 1 << 30)),
        ("de_bruijn", 8, {"p": BILLION}, (1, BILLION)),
        ("hyper_hypercube", BILLION + 7, {"k": 4}, (BILLION, 1006632960)),
        ("hyper_hypercube", BILLION + 7, {"k": BILLION}, (BILLION + 6, BILLION + 8)),
        ("margulis", BILLION, {}, (31622**2, 31623**2)),
        ("chordal", MAX_WORLD_SIZE, {}, (MAX_WORLD_SIZE - 1,)),
        ("paley", BILLION + 7, {}, (999999937, 1000000009)),
        ("alternating_exp_ring", 8, {"local_size": BILLION}, (1, 2 * BILLION)),
        ("local_global", BILLION + 1, {"local_size": BILLION}, (BILLION, 2 * BILLION)),
        ("barabasi_albert", 8, {"attachments": BILLION}, (1, BILLION + 1)),
        ("watts_strogatz", 8, {"neighbours": BILLION}, (1, BILLION)),
        ("random_regular", 8, {"degree": BILLION}, (1, BILLION + 1)),
    ],
)
def test_the_nearest_sizes_are_found_without_a_walk(
    name: str, world_size: int, options: dict[str, Any], nearest: tuple[int, ...]
) -> None:
    said = rf"the nearest (is|are) {' and '.join(map(str, nearest))}\."
    with pytest.raises(ValueError, match=said):
        topologies.build(name, world_size, **options)


@pytest.mark.parametrize(
    ("name", "k", "period"),
    [
        ("simple_base", BILLION, 3),  # 1 sub-block of 10^9 + 1 ranks and 6 more
        ("base", 10**8, 4),
        ("hyper_hypercube", BILLION + 6, 1),
        ("base", BILLION + 6, 1),
    ],
)
def test_no_loop_over_the_number_of_peers(name: str, k: int, period: int) -> None:
    assert topologies.build(name, BILLION + 7, k=k).period == period


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        *(
            (name, BILLION, {})
            for name in ("path", "star", "complete", "grid", "torus", "erdos_renyi", "watts_strogatz")
        ),
        ("chordal", BILLION + 7, {}),
        ("paley", BILLION + 9, {}),
        ("margulis", 10**8, {}),
        ("hypercube", 1 << 26, {}),
        ("alternating_exp_ring", 1 << 30, {"local_size": 8}),
        ("random_regular", BILLION, {"degree": 4}),
        ("barabasi_albert", BILLION, {}),
        ("random_matching", BILLION, {}),
        ("matchings", BILLION, {"graph": "ring"}),
        ("matcha", BILLION, {"graph": "ring"}),
        ("matcha", 10**6, {"graph": "complete"}),
        ("watts_strogatz", 2000, {"neighbours": 2000}),
    ],
)
def test_what_is_stored_has_a_limit(name: str, world_size: int, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' stores .* world_size of {world_size} .*: ring, ") as error:
        topologies.build(name, world_size, **options)
    assert "Choose a smaller world_size" in str(error.value)


def test_fewer_large_graphs_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("topologies.families.random_graphs._MOST_DRAWN_IN_ALL", 2000)
    with pytest.raises(ValueError, match=r"drew [5-9] graphs from seed 0 and none is connected"):
        topologies.build("erdos_renyi", 200, probability=0.005)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: topologies.build("equi_dyn", 8, seed=None), TypeError, "seed must be an integer"),
        (lambda: topologies.build("equi_static", 8, m=BILLION), ValueError, "m must be at most 1000000"),
        (lambda: topologies.build("local_global", 8, local_size=np.array(3.5)), TypeError, r"integer .*got 3\.5"),
        (lambda: topologies.build("hyper_cuboid", 12, factors=12), TypeError, r"use for example \[2, 2, 3\]"),
        (lambda: Topology.from_function(5), TypeError, "function must be a function of t"),  # type: ignore[arg-type]
        (
            lambda: Topology.from_function(lambda t: None if t else Round.identity(2)).round(3),  # type: ignore[arg-type,return-value]
            TypeError,
            "must return a Round, got NoneType for round 3",
        ),
    ],
)
def test_errors_of_options_and_functions(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    "measure",
    [
        lambda: topologies.build("ring", BILLION).describe(),
        lambda: topologies.compare([topologies.build("ring", BILLION)]),
        lambda: topologies.recommend(BILLION, latency_us=1, bandwidth_gbps=1, message_mb=1),
    ],
)
def test_a_billion_ranks_are_not_measured(measure: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"world_size must be at most 1000000 to be measured.*, got 1000000000; .*row"):
        measure()


def test_an_option_can_be_a_number_of_numpy() -> None:
    assert topologies.build("local_global", 8, local_size=np.array(2)).options == {"local_size": 2}
    assert topologies.build("hyper_cuboid", 8, factors=[np.array(2), np.int64(4)]).options == {"factors": (2, 4)}


@pytest.mark.parametrize("period", [None, 1, 3])
def test_a_promise_of_symmetry_is_checked(period: int | None) -> None:
    shift = Round.from_rows([{(rank + 1) % 5: 0.5} for rank in range(5)])
    with pytest.raises(ValueError, match="round 0 of topology 'custom' is not symmetric, which was promised"):
        Topology.from_function(lambda _: shift, period=period, symmetric=True)
    later = Topology.from_function(lambda t: shift if t else Round.identity(5), period=period, symmetric=True)
    assert later.symmetric
    if period != 1:
        with pytest.raises(ValueError, match="round 2 of topology 'custom' is not symmetric"):
            later.round(2)


@pytest.mark.parametrize("largest", [1, 2, 5, 13])
def test_fewest_factors_are_the_fewest_and_the_most_equal(largest: int) -> None:
    def best(number: int, limit: int) -> tuple[int, ...] | None:
        if number == 1:
            return ()
        rests = [(factor, best(number // factor, factor)) for factor in divisors(number) if 1 < factor <= limit]
        choices = [(factor, *rest) for factor, rest in rests if rest is not None]
        return min(choices, key=lambda factors: (len(factors), factors), default=None)

    for number in (*range(1, 260), 360, 1024, 1260):
        assert fewest_factors(number, largest) == best(number, largest)
