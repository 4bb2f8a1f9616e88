"""What is refused, and in which words; and whatever is asked for is built or refused at once, absurd sizes included."""

import functools
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest

import topologies
from topologies import Round, Topology, analysis, build, compare, recommend, weighted_round
from topologies.families.uniform_groups import fewest_factors
from topologies.graphs.edge_colouring import edge_colouring
from topologies.registry import Registry
from topologies.topology import from_dict
from topologies.validation import MAX_WORLD_SIZE, divisors

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


EDGES = [(0, 1), (1, 2), (2, 3)]
PAIRS = Round.from_groups(4, [(0, 1), (2, 3)])
CYCLE = nx.DiGraph([(0, 1), (1, 2), (2, 0)])
NETWORK = {"latency_us": 1, "bandwidth_gbps": 1, "message_mb": 1}
RING = build("ring", 8)
COLOURS = Registry("colour", {"red": int, "blue": float})
DATA: dict[str, Any] = {"name": "ring", "world_size": 4, "options": {}}
ROUNDS = {"name": "x", "world_size": 3, "stochasticity": "doubly", "rounds": [{"world_size": 3, "groups": []}]}
NESTED = functools.reduce(lambda data, _: {"permuted": data, "order": [0, 1, 2, 3]}, range(5000), DATA)
WARM = build("complete", 8).then(RING, after=5)
PULL = Topology.from_rounds([Round.from_rows([{}, *[{0: 0.5}] * 7])], stochasticity="row", name="pull")
PUSH = Topology.from_rounds([Round.from_matrix(PULL.round(0).matrix().T)], stochasticity="column", name="push")


def phases(*starts: int) -> dict[str, Any]:
    return {"phases": [{"start": start, "every": 1, "topology": DATA} for start in starts]}


#: Values that are not allowed, and what the error says.
VALUES = [
    # Of names
    (lambda: COLOURS.get("bleu"), r"^unknown colour 'bleu'\. Did you mean 'blue'\? Available: blue, red$"),
    (lambda: COLOURS.get("xyz"), r"^unknown colour 'xyz'\. Available: blue, red$"),
    (lambda: COLOURS.register("red")(str), r"the colour name 'red' is taken by builtins\.int; choose another name"),
    # Of options
    (lambda: build("local_global", 10, local_size=4), r"the nearest are 8 and 12.*\[1, 2, 5, 10\]"),
    (lambda: build("equi_static", 8, m=BILLION), "m must be at most 1000000"),
    (lambda: build("grid", 10, shape=(3, 4)), r"\(3, 4\).*12 ranks.*rows out of 1, 2, 5, 10"),
    (lambda: build("hyper_cuboid", 10, factors=(3, 4)), r"multiply to 12, world_size is 10.*\(2, 5\)"),
    (lambda: build("hyper_cuboid", 10, factors=(-2, -5)), "a factor in factors must be at least 1, got -2"),
    (lambda: build("hyper_hypercube", 22, k=3), r"at most k \+ 1 = 4, got 22; .*18 and 24.*k of at least 10"),
    (lambda: build("watts_strogatz", 9, neighbours=3), r"must be even.* got 3; use 2 or 4"),
    (
        lambda: build("random_regular", 7, degree=3),
        r"above degree = 3 and even, got 7; the nearest are 6 and 8\..* for 7 ranks a degree out of 2, 4, 6\.",
    ),
    (
        lambda: build("random_regular", 3, degree=4),
        r"above degree = 4, got 3; the nearest are 1 and 5\..* for 3 ranks a degree out of 2\.",
    ),
    (lambda: build("random_regular", 30, degree=31), r"for 30 ranks a degree out of 2, 3, 4, 5, 6, 7, \.\., 29\."),
    (
        lambda: build("random_regular", 6, degree=1),
        r"degree 1 .* only for world_size 2, got 6; choose for 6 ranks a degree out of 2, 3, 4, 5\.",
    ),
    # Of graphs, and families that name one
    (lambda: build("matchings", 4, graph=nx.DiGraph(EDGES)), "graph is directed.*to_undirected"),
    (lambda: build("matchings", 4, graph=nx.cycle_graph(5)), "5 nodes, world_size is 4.*use world_size 5"),
    (
        lambda: build("matchings", 4, graph="rings"),
        "graph='rings' is no registered family, and no file without a suffix; pass the name",
    ),
    (lambda: build("matchings", 4, graph="directed_ring"), "does not repeat one symmetric round"),
    (lambda: build("matchings", 4, graph="one_peer_ring"), "does not repeat one symmetric round"),
    (lambda: build("matchings", 4, graph="graph"), "cannot be used here.*needs the option 'graph'"),
    (lambda: build("matchings", 4, graph="paley"), "'paley' names a family that cannot.*the nearest"),
    (lambda: build("matchings", 4, graph="cycle.png"), "none of the suffixes"),
    (lambda: Topology.from_graph(nx.DiGraph(EDGES[:2]), "uniform"), "not strongly connected: 3 components"),
    (
        lambda: Topology.from_graph(CYCLE, "best_constant"),
        "'best_constant' is defined for undirected graphs.*'uniform', 'push_sum', 'given'",
    ),
    (lambda: Topology.from_graph(nx.Graph([(0, 1), *EDGES[2:], (3, 4)])), "not connected: 2 components of 3, 2 nodes"),
    (
        lambda: Topology.from_graph(nx.Graph([(0, "a")])),
        "labels of the types int, str, which have no common order; relabel",
    ),
    # These compare as subsets, so they sort, but to no order.
    (lambda: Topology.from_graph(nx.Graph([(frozenset("a"), frozenset("b"))])), "labels of the types frozenset, which"),
    (
        lambda: Topology.from_graph(nx.Graph([(0, 1, {"weight": -1.0})])),
        r"the weight of the edge 0 - 1 of graph must be above 0 and finite, got -1\.0",
    ),
    (lambda: edge_colouring([(0, 1), (2, 2)]), "a loop at node 2"),
    (lambda: edge_colouring([(0, -1)]), "graph names rank -1"),
    # Of rounds
    (lambda: weighted_round(4, EDGES[::2], "fdla"), "do not join all ranks, and weights='fdla'.*add edges"),
    (
        lambda: weighted_round(4, EDGES, "lazy", directed=True),
        "'lazy' is defined for undirected graphs.*'uniform', 'push_sum', 'given'",
    ),
    (lambda: weighted_round(3, [(-1, 1)]), "edges names rank -1, ranks go from 0 to 2"),
    (lambda: weighted_round(3, [(0, 1, 2)]), r"edges must have the shape \[edges, 2\], got \[1, 3\]"),
    (lambda: Round.from_edges(3, [0], [1], [0.5, 0.2]), r"weights .* shape \[1\], one per edge.*\[2\]"),
    (lambda: Round.from_edges(3, [[0]], [[1]], 0.5), r"of shape \[1, 1\]"),
    (lambda: Round.from_edges(2, [1], [1], 0.5), "1 -> 1 is a loop"),
    (lambda: Round.from_edges(2, [0, 0], [1, 1], 0.5), "1 -> 0 is given twice"),
    (lambda: Round.from_groups(3, [(0, 3)]), "a rank in groups must be at most 2, got 3"),
    (lambda: Round.from_groups(3, [(0, 1), (1, 2)]), "rank 1 twice"),
    (lambda: Round.from_matrix(np.ones((2, 3))), r"square.*\[2, 3\]"),
    (lambda: Round.from_matrix([[0.5, np.nan], [0, 1]]), "edge 1 -> 0 has a weight that is not finite"),
    (lambda: Round.from_matrix([[0, 1], [0, np.inf]]), "edge 1 -> 1 has a self weight that is not finite"),
    (lambda: Round.from_dict({"world_size": 2}), "needs the keys"),
    (lambda: Round.identity(2).neighbours(2), "rank must be at most 1, got 2"),
    # Of schedules
    (lambda: Topology.from_rounds([PAIRS, Round.identity(3)]), "round 1 .* 3 ranks"),
    (lambda: Topology.from_rounds([PAIRS], stochasticity="rows"), "'doubly', 'row', 'column'"),
    (lambda: Topology.from_function(lambda _: PAIRS, period=0), "period must be at least 1"),
    (lambda: Topology.from_function(lambda *_: PAIRS, seed=-1), "seed must be at least 0"),
    (
        lambda: Topology.from_function(lambda _: PAIRS, name="free").every(2).to_json(),
        "'free' computes its rounds by a function without a period",
    ),
    (lambda: Topology.from_json("{"), "not JSON"),
    (lambda: from_dict(Topology, 5), "a topology needs the keys .* got 5"),
    (lambda: from_dict(Topology, DATA | {"options": 5}), "this is no topology"),
    (lambda: from_dict(Topology, ROUNDS | {"rounds": [5]}), "a round needs the keys .* got 5"),
    (lambda: from_dict(Topology, ROUNDS | {"world_size": 4}), "world_size is 4, but the rounds are for 3"),
    (lambda: from_dict(Topology, {"interleave": [DATA]}), "a topology needs the keys"),
    (lambda: from_dict(Topology, phases(1)), r"the first one at 0, got \[1\]"),
    (lambda: from_dict(Topology, phases(0, 5, 5)), r"must start at rising rounds.*got \[0, 5, 5\]"),
    (lambda: from_dict(Topology, NESTED), r"this is no topology \(RecursionError"),
    (lambda: RING.round(-1), "t must be at least 0, got -1"),
    (lambda: build("ring", 1).every(0), "k must be at least 1, got 0"),
    (lambda: RING.then(RING, after=-1), "after must be at least 0, got -1"),
    (
        lambda: RING.interleave(build("ring", 3)),
        "other is 'ring' for 3 ranks.*for 8; build both for the same world_size",
    ),
    (lambda: RING.product(WARM), r"a warm-up of 5 rounds; combine first.*then\(\.\.\., after=5"),
    (lambda: RING.interleave(WARM), "interleave combines schedules that repeat, but .* a warm-up of 5 rounds"),
    (lambda: WARM.product(RING), "begins with a warm-up of 5 rounds"),
    (lambda: WARM.interleave(RING), "begins with a warm-up of 5 rounds"),
    *(
        (combine, "'pull' is only row-stochastic and 'push' only column-stochastic")
        for combine in (lambda: PULL.product(PUSH), lambda: PULL.interleave(PUSH), lambda: PULL.then(PUSH, after=1))
    ),
    *(
        (
            lambda made=made: made.resized(3),
            r"was made for 4 ranks by rounds or as a product, so that",
        )
        for made in (
            Topology.from_rounds([PAIRS]),
            Topology.from_function(lambda _: PAIRS, period=6).every(2),
        )
    ),
    (lambda: RING.permuted([*range(8), 7]), "order must name every rank from 0 to 7 once"),
    # Of measurements, comparisons and recommendations
    (lambda: analysis.traffic(RING, message_bytes=np.inf), "must be at least 0 and finite, got inf"),
    (lambda: analysis.round_traffic(RING.round(0), 3), "local_size must divide world_size 8, got 3"),
    (lambda: analysis.product(RING, -1), "num_rounds must be at least 0, got -1"),
    (lambda: analysis.slem([[2, 0], [0, 3]]), "slem is defined for a matrix whose rows or columns sum to 1"),
    (lambda: analysis.diameter(build("ring", 20_000)), "diameter of 20000 ranks is not computed"),
    *(
        (measure, "world_size must be at most 1000000 to be measured.*, got 1000000000; .*row")
        for measure in (
            lambda: build("ring", BILLION).describe(),
            lambda: compare([build("ring", BILLION)]),
            lambda: recommend(BILLION, **NETWORK),
        )
    ),
    (lambda: compare(["rng"], world_size=8), "unknown topology 'rng'.*mean 'ring'"),
    (lambda: compare(["hypercube"], world_size=6), "'hypercube' needs a world_size that is a power of two, got 6"),
    (lambda: compare([], world_size=6), "topologies is empty"),
    (lambda: recommend(8, **NETWORK | {"latency_us": -1}), "latency_us must be at least 0 and finite, got -1"),
    (lambda: recommend(8, **NETWORK | {"bandwidth_gbps": 0}), "bandwidth_gbps must be above 0 and .* got 0"),
    (lambda: recommend(8, **NETWORK | {"message_mb": np.nan}), "message_mb must be above 0 .*, got nan"),
    (
        lambda: recommend(8, **NETWORK, local_size=5),
        "local_size must divide world_size 8, got 5; use one of 1, 2, 4, 8",
    ),
    (lambda: recommend(9, topologies=[RING], **NETWORK), "topologies holds 'ring' for 8 ranks, world_size is 9"),
]

#: What is of another type.
TYPES = [
    # Of names
    (lambda: COLOURS.get(["red"]), "the name of a colour must be a str, got .*; pass one of blue, red"),
    (lambda: COLOURS.register(["red"]), "the name of a colour must be a str, got .*; pass one of blue, red"),
    (
        lambda: topologies.register("mine")(lambda world_size, hops: build("ring", world_size + hops)),
        "'mine' must be keyword-only",
    ),
    # Of options
    (
        lambda: build("local_global", 8, localsize=2),
        "'local_global' has no option 'localsize'.*mean 'local_size'.*are: local_size",
    ),
    (lambda: build("ring", 8, seed=2), "'ring' has no option 'seed'; it has no options"),
    (lambda: build("local_global", 8), "'local_global' needs the option 'local_size'"),
    (lambda: build("local_global", 8, local_size=np.array(3.5)), r"integer .*got 3\.5"),
    (lambda: build("equi_dyn", 8, seed=None), "seed must be an integer"),
    (lambda: build("torus", 10, shape=5), r"pair \(rows, columns\), got 5"),
    (lambda: build("torus", 10, shape=(2.0, 5)), "side of shape must be an integer"),
    (lambda: build("hyper_cuboid", 12, factors=12), r"use for example \[2, 2, 3\]"),
    # Of graphs, and families that name one
    (lambda: Topology.from_graph(nx.Graph([(0, 1, {"weight": "heavy"})])), "must be a number, above 0 .* got 'heavy'"),
    (lambda: edge_colouring([("a", "b")]), "graph must be integers"),
    # Of rounds
    (lambda: weighted_round(3, nx.path_graph(3)), "edges is a networkx graph; pass its edges"),
    (lambda: weighted_round(3, [(0, 1), (2,)]), "edges must be integers, .* lists of the same length"),
    (lambda: weighted_round(3, [(0.7, 1.2)]), "edges must be integers"),
    (lambda: Round.from_rows(np.eye(2)), r"rows\[0\] must be a mapping .* use Round.from_matrix"),
    (lambda: Round.from_rows([{}, {0: "0.5"}]), r"a weight in rows\[1\] must be a number, finite, got '0.5'"),
    (lambda: Round.from_rows([{1.5: 0.5}, {0: 0.5}]), r"a rank in rows\[0\] must be an integer of at least 0"),
    (lambda: Round.from_rows(None), "rows must be a list of mappings"),
    (lambda: Round.from_groups(4, [0, 1]), "a group in groups must be a list of ranks, got 0"),
    # Of schedules
    (lambda: Topology.from_rounds([]), "at least one Round"),
    (lambda: Topology.from_rounds([np.eye(2)]), r"at least one Round.*Round.from_matrix"),
    (lambda: Topology.from_function(5), "function must be a function of t"),
    (lambda: Topology.from_function(lambda _: np.eye(2)), "must return a Round, got ndarray"),
    (
        lambda: Topology.from_function(lambda t: None if t else PAIRS).round(3),
        "must return a Round, got NoneType for round 3",
    ),
    (lambda: RING.product("ring"), r"must be a Topology, got 'ring' \(str\)"),
    (lambda: RING.interleave("ring"), r"must be a Topology, got 'ring' \(str\)"),
    (lambda: RING.permuted([*range(7), 7.0]), "order must be integers"),
    # Of measurements, comparisons and recommendations
    (lambda: analysis.rounds_to(RING, "x"), r"tolerance must be a number, between 0 and 1, .* 'x' \(str\)"),
    (lambda: compare(["ring"]), "world_size is needed to build 'ring'"),
    (lambda: compare("ring", world_size=6), "must be a list of names and topologies, got 'ring'"),
    (lambda: compare([7], world_size=6), "topologies holds 7"),
]


@pytest.mark.parametrize(
    ("kind", "call", "message"), [*((ValueError, *row) for row in VALUES), *((TypeError, *row) for row in TYPES)]
)
def test_what_is_refused_and_why(kind: type[Exception], call: Callable[[], Any], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


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
        if (expected := best(number, largest)) is not None:
            assert fewest_factors(number, largest) == expected
