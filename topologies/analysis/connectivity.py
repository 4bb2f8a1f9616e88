"""Who reaches whom: degrees, connectivity and diameter over a period."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from topologies.matrix_storage import Groups, IntArray
from topologies.round import Round
from topologies.schedule import Schedule, check_schedule
from topologies.validation import check_integer

#: Above this size matrices of who has heard of whom are not formed.
MAX_DIAMETER_WORLD_SIZE = 2048

#: How many exchanges are looked at of a schedule without a period.
SAMPLED_ROUNDS = 16


def distinct_rounds(topology: Schedule, *, warmup: bool = True) -> list[Round]:
    """Return the exchanges of the warm-up and of one period, 16 of a part without a period; no local steps."""
    check_schedule("topology", topology)
    return [
        phase.topology.round(exchange)
        for phase in (topology.phases if warmup else topology.phases[-1:])
        for exchange in range(phase.num_distinct(sampled=SAMPLED_ROUNDS))
    ]


def exchanges_from(topology: Schedule, start: int | None) -> tuple[Schedule, int, Callable[[int], int]]:
    """Return what takes place from round ``start`` on, by default after the warm-up, without local steps in between.

    That is the topology whose rounds are exchanged, the first of them, and how many rounds k of them take.
    """
    check_schedule("topology", topology)
    start = topology.warmup if start is None else check_integer("start", start, minimum=0)
    last = topology.phases[-1]
    if start < last.start:
        return topology, start, lambda k: k
    first = (start - last.start) // last.every
    return last.topology, first, lambda k: last.start + last.every * (first + k) - start


@dataclass(frozen=True)
class Degrees:
    """Messages of the busiest rank in any round, and on average over ranks and rounds, point to point."""

    max_sends: int
    max_receives: int
    mean: float


def degrees(topology: Schedule) -> Degrees:
    """Return how many others a rank sends to and reads: at most, and on average after the warm-up.

    Examples
    --------
    >>> degrees(topologies.build("star", 5))
    Degrees(max_sends=4, max_receives=4, mean=1.6)
    """
    rounds, repeated = distinct_rounds(topology), distinct_rounds(topology, warmup=False)
    return Degrees(
        max_sends=max(int(round_.num_targets().max()) for round_ in rounds),
        max_receives=max(int(round_.num_sources().max()) for round_ in rounds),
        mean=float(np.mean([round_.num_targets().mean() for round_ in repeated])) / topology.phases[-1].every,
    )


def connected(topology: Schedule) -> bool:
    """Whether the values of any rank reach every other rank over repeated periods (without one: over 16 exchanges).

    Examples
    --------
    >>> connected(topologies.build("one_peer_ring", 6))
    True
    """
    from scipy import sparse

    n = topology.world_size
    edges = [
        all_reduce_rings(round_.uniform_groups)[:2] if round_.uniform_groups is not None else round_.edges()[:2]
        for round_ in distinct_rounds(topology, warmup=False)
    ]
    ends = tuple(np.concatenate(ranks) for ranks in zip(*edges, strict=True))
    graph = sparse.coo_array((np.ones(len(ends[0])), ends), shape=(n, n))
    num_components, _ = sparse.csgraph.connected_components(graph, directed=True, connection="strong")
    return bool(num_components == 1)


def all_reduce_rings(groups: Groups) -> tuple[IntArray, IntArray, IntArray]:
    """Return receivers and senders where each rank sends to the next of its group, and the size of their group."""
    large = [group for group in groups if len(group) > 1]
    lengths = np.fromiter(map(len, large), np.int64, len(large))
    senders = np.fromiter(itertools.chain.from_iterable(large), np.int64, int(lengths.sum()))
    ends = np.cumsum(lengths)
    receivers = np.roll(senders, -1)
    receivers[ends - 1] = senders[ends - lengths]  # the last one sends to the first
    return receivers, senders, np.repeat(lengths, lengths)


def diameter(topology: Schedule) -> int | None:
    """Return over how many edges the farthest two ranks hear of each other; ``None``: never.

    The edges are those of all rounds of a period (without one, of 16 exchanges) together.

    Raises
    ------
    ValueError
        Above 2048 ranks.

    Examples
    --------
    >>> diameter(topologies.build("ring", 9)), diameter(topologies.build("one_peer_hypercube", 8))
    (4, 3)
    """
    n = topology.world_size
    if n > MAX_DIAMETER_WORLD_SIZE:
        raise ValueError(
            f"the diameter of {n} ranks is not computed, at most that of {MAX_DIAMETER_WORLD_SIZE} is; use fewer ranks"
        )
    rounds = distinct_rounds(topology, warmup=False)
    if n == 1 or not connected(topology):
        return 0 if n == 1 else None
    within = [np.eye(n, dtype=np.float32)]  # of each pair of ranks, whether 2^k edges are enough
    for round_ in rounds:
        readers, senders, _ = round_.edges()
        within[0][readers, senders] = 1.0
    while not within[-1].all():
        within.append(np.minimum(within[-1] @ within[-1], 1.0))
    heard, distance = np.eye(n, dtype=np.float32), 0
    for k in reversed(range(len(within) - 1)):
        farther = np.minimum(heard @ within[k], 1.0)
        if not farther.all():
            heard, distance = farther, distance + 2**k
    return distance + 1
