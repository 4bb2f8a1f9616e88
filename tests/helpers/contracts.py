"""The contract table: what every family states about itself. A new family costs one row in CONTRACTS."""

# ruff: noqa: ARG005 - the functions of a row are all called with the size and the options, needed or not

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import numpy as np

import topologies

SIZES = range(1, 41)
TOLERANCE = 1e-12

#: Exactness: the family never averages exactly, or promises nothing about it.
NEVER, UNPROMISED = "never", None


def tau(n: int) -> int:
    return (n - 1).bit_length()


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def is_smooth(n: int, largest: int) -> bool:
    for factor in range(2, largest + 1):
        while n % factor == 0:
            n //= factor
    return n == 1


def is_prime(n: int) -> bool:
    return n > 1 and all(n % divisor for divisor in range(2, n))


def ring_slem(n: int) -> float:
    return 1 / 3 + 2 / 3 * math.cos(2 * math.pi / n) if n >= 3 else 0.0


def fewest(n: int, largest: int) -> int:
    """The fewest factors of n, each at most ``largest``, by exhaustive search."""
    if n == 1:
        return 0
    return min(1 + fewest(n // f, largest) for f in range(2, largest + 1) if n % f == 0 and is_smooth(n // f, largest))


def digits(n: int, base: int) -> list[int]:
    return [*digits(n // base, base), n % base] if n else []


def simple_base_length(n: int, k: int = 1) -> int:
    if is_smooth(n, k + 1):
        return fewest(n, k + 1)
    first, *others = digits(n, k + 1)
    return 2 * len(others) + 1 + (first > 1)


def base_length(n: int, k: int = 1) -> int:
    smooth = max(p for p in range(1, n + 1) if n % p == 0 and is_smooth(p, k + 1))
    return min(simple_base_length(n, k), simple_base_length(n // smooth, k) + fewest(smooth, k + 1))


def hops_are_symmetric(n: int, num_hops: int, seed: int) -> bool:
    hops = np.random.default_rng((seed,)).integers(1, n, size=num_hops)
    return sorted(hops) == sorted(n - hops)


def num_matchings(n: int, graph: str) -> int:
    """The fewest matchings: the largest degree, but one more for odd cycles and complete graphs of odd size."""
    if graph == "ring":
        return 1 if n == 2 else 2 + n % 2
    if graph == "complete":
        return n - 1 + n % 2 if n > 2 else 1
    round_ = topologies.build(graph, n).round(0)
    return int(round_.num_sources().max())


def torus_slem(n: int, shape: tuple[int, int] | None = None) -> float | None:
    rows, columns = shape or max((a, n // a) for a in range(1, math.isqrt(n) + 1) if n % a == 0)
    if min(rows, columns) < 3:
        return None
    return 1 - 0.4 * (1 - math.cos(2 * math.pi / max(rows, columns)))


@dataclass
class Contract:
    """What a family promises: values, or functions of the world size (2 or more) and the options."""

    name: str
    options: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    serves: Callable[..., bool] = lambda n, **_: True
    period: Any = 1
    degree: Any = lambda n, **_: n - 1
    exact: Any = UNPROMISED
    symmetric: Any = True
    stochasticity: Any = "doubly"
    uniform_groups: bool = False
    slem: Any = None
    negative_weights: Any = False
    more_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("period", "degree", "exact", "symmetric", "stochasticity", "slem", "negative_weights"):
            if not callable(value := getattr(self, name)):
                setattr(self, name, lambda *_, value=value, **__: value)


def assert_views_agree(round_: topologies.Round) -> None:
    """What each rank sees of a round is what the whole matrix says."""
    matrix = round_.matrix()
    for i in range(round_.world_size):
        reads = [j for j in range(round_.world_size) if j != i and matrix[i, j]]
        read_by = [j for j in range(round_.world_size) if j != i and matrix[j, i]]
        assert list(round_.neighbours(i).items()) == [(j, matrix[i, j]) for j in reads]
        assert round_.targets(i) == tuple(read_by)
        assert round_.peers(i) == tuple(sorted({*reads, *read_by}))
        assert round_.self_weight(i) == matrix[i, i]


def up_to(limit: int) -> Callable[..., Any]:
    return lambda n, **_: 1 if n <= limit else UNPROMISED


def graph_options(n: int) -> list[dict[str, Any]]:
    schemes = "metropolis metropolis_hastings max_degree lazy uniform push_sum best_constant"
    return [{"graph": nx.wheel_graph(n), "weights": scheme} for scheme in schemes.split()]


CONTRACTS = [
    Contract("complete", exact=1, uniform_groups=True, slem=0.0),
    Contract("ring", degree=lambda n: min(2, n - 1), exact=up_to(3), slem=ring_slem),
    Contract(
        "directed_ring", degree=1, exact=up_to(2), symmetric=lambda n: n == 2, slem=lambda n: math.cos(math.pi / n)
    ),
    Contract(
        "path",
        degree=lambda n: min(2, n - 1),
        exact=up_to(2),
        slem=lambda n: 1 / 3 + 2 / 3 * math.cos(math.pi / n) if n > 2 else 0.0,
    ),
    Contract("star", exact=up_to(2), slem=lambda n: 1 - 1 / n if n >= 3 else 0.0),
    Contract(
        "grid",
        options=[{}, {"shape": (3, 4)}, {"shape": [1, 7]}],
        serves=lambda n, shape=None: shape is None or math.prod(shape) == n,
        degree=lambda n, **_: min(4, n - 1),
    ),
    Contract(
        "torus",
        options=[{}, {"shape": (3, 4)}, {"shape": (5, 3)}, {"shape": (2, 8)}],
        serves=lambda n, shape=None: shape is None or math.prod(shape) == n,
        degree=lambda n, **_: min(4, n - 1),
        slem=torus_slem,
    ),
    Contract(
        "hypercube", serves=is_power_of_two, degree=tau, exact=up_to(2), slem=lambda n: (tau(n) - 1) / (tau(n) + 1)
    ),
    Contract(
        "exponential",
        degree=tau,
        exact=up_to(3),
        symmetric=lambda n: n <= 3,
        slem=lambda n: 1 - 2 / (1 + tau(n)) if n % 2 == 0 else None,
    ),
    Contract(
        "undirected_exponential",
        degree=lambda n: min(2 * tau(n), n - 1),
        exact=lambda n: 1 if n in (2, 3, 4, 5, 7) else UNPROMISED,
    ),
    Contract(
        "one_peer_ring",
        serves=lambda n: n % 2 == 0,
        period=lambda n: 1 if n == 2 else 2,
        degree=1,
        exact=lambda n: {2: 1, 4: 2}.get(n, UNPROMISED),
        uniform_groups=True,
    ),
    Contract(
        "one_peer_exponential",
        period=tau,
        degree=1,
        exact=lambda n: tau(n) if is_power_of_two(n) else NEVER,
        symmetric=lambda n: n == 2,
    ),
    Contract("one_peer_hypercube", serves=is_power_of_two, period=tau, degree=1, exact=tau, uniform_groups=True),
    Contract(
        "hyper_cuboid",
        options=[{"factors": f} for f in ((2,), (3, 2), (2, 3), (2, 2, 3), (5, 5), (4, 7), (31,), (3, 3, 3))],
        serves=lambda n, factors: math.prod(factors) == n,
        period=lambda n, factors: len(factors),
        degree=lambda n, factors: max(factors) - 1,
        exact=lambda n, factors: len(factors),
        uniform_groups=True,
    ),
    Contract(
        "hyper_hypercube",
        options=[{"k": k} for k in (1, 2, 3, 4, 5)],
        serves=lambda n, k: is_smooth(n, k + 1),
        period=lambda n, k: fewest(n, k + 1),
        degree=lambda n, k: k,
        exact=lambda n, k: fewest(n, k + 1),
        uniform_groups=True,
    ),
    Contract(
        "simple_base",
        options=[{}, *({"k": k} for k in (2, 3, 4, 5))],
        period=simple_base_length,
        degree=lambda n, k=1: k,
        exact=simple_base_length,
    ),
    Contract(
        "base",
        options=[{}, *({"k": k} for k in (2, 3, 4, 5))],
        period=base_length,
        degree=lambda n, k=1: k,
        exact=base_length,
    ),
    Contract(
        "local_global",
        options=[{"local_size": size} for size in (1, 2, 3, 4, 8)],
        serves=lambda n, local_size: n % local_size == 0,
        period=2,
        degree=lambda n, local_size: max(local_size, n // local_size) - 1,
        exact=lambda n, local_size: 1 if local_size == n else 2,
        uniform_groups=True,
    ),
    Contract(
        "alternating_exp_ring",
        options=[{"local_size": size} for size in (1, 2, 3, 4, 8)],
        serves=lambda n, local_size: n in [local_size * 2**k for k in range(1, 6)],
        period=lambda n, local_size: 2 * tau(n // local_size),
        degree=lambda n, local_size: 2 * local_size - 1,
        exact=lambda n, local_size: 2 * tau(n // local_size),
        uniform_groups=True,
    ),
    Contract(
        "de_bruijn",
        options=[{"p": p} for p in (2, 3, 4, 5)],
        serves=lambda n, p: digits(n, p) == [1] + [0] * (len(digits(n, p)) - 1),
        degree=lambda n, p: min(p, n - 1),
        exact=lambda n, p: len(digits(n, p)) - 1,
        symmetric=lambda n, p: n == p,
    ),
    Contract(
        "equi_static",
        options=[{}, {"m": 3, "seed": 5}, {"directed": True}, {"m": 2, "seed": 1, "directed": True}],
        degree=lambda n, m=None, seed=0, directed=False: min((m or tau(n)) * (1 if directed else 2), n - 1),
        symmetric=lambda n, m=None, seed=0, directed=False: not directed or hops_are_symmetric(n, m or tau(n), seed),
    ),
    Contract(
        "equi_dyn",
        options=[{}, {"seed": 5, "eta": 1.0}, {"directed": True}, {"seed": 3, "directed": True, "eta": 0.25}],
        period=None,
        degree=1,
        symmetric=lambda n, directed=False, **_: not directed or n == 2,
    ),
    Contract("random_matching", options=[{"seed": 0}, {"seed": 7}], period=None, degree=1, uniform_groups=True),
    Contract(
        "graph",
        options=[option for n in (4, 6) for option in graph_options(n)],
        serves=lambda n, graph, weights: len(graph) == n,
        symmetric=lambda n, graph, weights: weights not in ("uniform", "push_sum") or nx.is_regular(graph),
        stochasticity=lambda n, graph, weights: (
            "doubly" if nx.is_regular(graph) else {"uniform": "row", "push_sum": "column"}.get(weights, "doubly")
        ),
        # L has the eigenvalues 0, 3 - 2 cos(2 pi / (n - 1)) < 3 and n: the hub keeps less than 1 - 2 (n - 1) / (n + 3).
        negative_weights=lambda n, graph, weights: weights == "best_constant" and n > 5,
    ),
    Contract(
        "random_regular",
        options=[{}, {"degree": 3, "seed": 5}, {"degree": 2}, {"degree": 6, "weights": "lazy"}, {"degree": 31}],
        serves=lambda n, degree=None, **_: degree is None or (n > degree and n * degree % 2 == 0),
        degree=lambda n, degree=None, **_: min(n - 1, 3 + n % 2) if degree is None else degree,
        exact=lambda n, degree=None, weights="metropolis", **_: (
            1 if weights == "metropolis" and n - 1 <= (degree or 3) else UNPROMISED
        ),
    ),
    Contract(
        "matchings",
        options=[{"graph": name} for name in ("ring", "path", "star", "grid", "complete", "hypercube")],
        serves=lambda n, graph: graph != "hypercube" or is_power_of_two(n),
        period=num_matchings,
        degree=1,
        exact=lambda n, graph: tau(n) if graph == "hypercube" else UNPROMISED,
        uniform_groups=True,
    ),
    Contract(
        "matcha",
        options=[
            {"graph": "ring"},
            {"graph": "star", "budget": 0.3, "seed": 5},
            {"graph": "grid", "budget": 0.7},
            {"graph": "complete", "budget": 1},
        ],
        period=lambda n, budget=0.5, **_: 1 if budget == 1 else None,
        degree=lambda n, graph, **_: num_matchings(n, graph) if n > 2 else 1,
        exact=lambda n, graph, **_: 1 if graph == "complete" else UNPROMISED,
        negative_weights=None,
    ),
    Contract(
        "erdos_renyi",
        options=[{}, {"seed": 3}, {"probability": 0.5, "weights": "max_degree"}, {"probability": 1}],
        exact=lambda n, probability=None, **_: 1 if probability == 1 or n == 2 else UNPROMISED,
    ),
    Contract(
        "watts_strogatz",
        options=[{}, {"neighbours": 2, "probability": 0.0}, {"neighbours": 6, "probability": 0.5, "seed": 4}],
        serves=lambda n, neighbours=2, **_: n >= neighbours,
        slem=lambda n, neighbours=4, probability=0.1, **_: ring_slem(n) if neighbours == 2 else None,
    ),
    Contract(
        "barabasi_albert",
        options=[{}, {"attachments": 1, "seed": 9}, {"attachments": 5, "weights": "lazy"}],
        serves=lambda n, attachments=1, **_: n > attachments,
        exact=lambda n, weights="metropolis", **_: 1 if n == 2 and weights == "metropolis" else UNPROMISED,
    ),
    Contract(
        "margulis",
        options=[{}, {"weights": "lazy"}],
        serves=lambda n, **_: math.isqrt(n) ** 2 == n,
        degree=lambda n, **_: min(8, n - 1),
    ),
    Contract(
        "chordal",
        options=[{}, {"weights": "max_degree"}],
        serves=lambda n, **_: is_prime(n),
        degree=lambda n, **_: min(3, n - 1),
        exact=up_to(3),
    ),
    Contract(
        "paley",
        options=[{}, {"weights": "best_constant"}],
        serves=lambda n, **_: n % 4 == 1 and is_prime(n),
        degree=lambda n, **_: (n - 1) // 2,
        exact=NEVER,
        slem=lambda n, weights="metropolis": (1 + math.sqrt(n)) / (1 + n) if weights == "metropolis" else n**-0.5,
    ),
    Contract("karate_club", serves=lambda n: n == 34, degree=17, exact=NEVER),
    Contract("davis", serves=lambda n: n == 32, degree=14, exact=NEVER),
    Contract("florentine", serves=lambda n: n == 15, degree=6, exact=NEVER),
    Contract("les_miserables", serves=lambda n: n == 77, degree=36, exact=NEVER, more_sizes=(77,)),
]
