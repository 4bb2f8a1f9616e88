"""Who reaches whom: degrees, connectivity and diameter over a period."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from topologies.matrix_storage import IntArray
from topologies.round import Round
from topologies.schedule import Schedule, check_schedule
from topologies.validation import check_integer

#: Above this size the sets of who has heard of whom, n^2 bits, are not formed.
MAX_DIAMETER_WORLD_SIZE = 16_384

#: How many exchanges are looked at of a schedule without a period.
SAMPLED_ROUNDS = 16

#: Distances up to which sets of who has heard of whom are formed; from there on ranks are searched one by one.
_MOST_SWEEPS = 32

#: Memory of the sets that are looked at at once.
_BLOCK_BYTES = 1 << 24


def repeated_rounds(topology: Schedule) -> list[Round]:
    """Return the exchanges of one period after the warm-up, or the first 16 without a period; no local steps."""
    check_schedule("topology", topology)
    last = topology.phases[-1]
    return [last.topology.round(exchange) for exchange in range(last.num_distinct(sampled=SAMPLED_ROUNDS))]


def distinct_rounds(topology: Schedule) -> list[Round]:
    """Return the exchanges of the warm-up and of one period, 16 of a part without a period; no local steps."""
    check_schedule("topology", topology)
    return [
        phase.topology.round(exchange)
        for phase in topology.phases
        for exchange in range(phase.num_distinct(sampled=SAMPLED_ROUNDS))
    ]


def exchanges_from(topology: Schedule, start: int | None) -> tuple[Schedule, int, Callable[[int], int]]:
    """Return what takes place from round ``start`` on, without the local steps in between.

    Parameters
    ----------
    start
        A round; by default the first after the warm-up.

    Returns
    -------
    The topology whose rounds are exchanged, the first of them, and how many rounds of the schedule k of them take.
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
    >>> import topologies
    >>> degrees(topologies.build("star", 5))
    Degrees(max_sends=4, max_receives=4, mean=1.6)
    """
    rounds, repeated = distinct_rounds(topology), repeated_rounds(topology)
    return Degrees(
        max_sends=max(int(round_.num_targets().max()) for round_ in rounds),
        max_receives=max(int(round_.num_sources().max()) for round_ in rounds),
        mean=float(np.mean([round_.num_targets().mean() for round_ in repeated])) / topology.phases[-1].every,
    )


def connected(topology: Schedule) -> bool:
    """Whether the values of any rank reach every other rank over repeated periods (without one: over 16 exchanges).

    Examples
    --------
    >>> import topologies
    >>> connected(topologies.build("one_peer_ring", 6))
    True
    """
    from scipy import sparse

    links = _Links(repeated_rounds(topology))
    hubs, num_nodes = links.hubs + topology.world_size, topology.world_size + links.num_hubs
    ends = np.concatenate((links.readers, links.members, hubs)), np.concatenate((links.senders, hubs, links.members))
    graph = sparse.coo_array((np.ones(len(ends[0])), ends), shape=(num_nodes, num_nodes))
    num_components, _ = sparse.csgraph.connected_components(graph, directed=True, connection="strong")
    return bool(num_components == 1)


def diameter(topology: Schedule) -> int | None:
    """Return over how many edges the farthest two ranks hear of each other; ``None``: never.

    The edges are those of all rounds of a period (without one, of 16 exchanges) together.

    Raises
    ------
    ValueError
        Above 16,384 ranks.

    Examples
    --------
    >>> import topologies
    >>> diameter(topologies.build("ring", 9)), diameter(topologies.build("one_peer_hypercube", 8))
    (4, 3)
    """
    n = topology.world_size
    if n > MAX_DIAMETER_WORLD_SIZE:
        raise ValueError(
            f"the diameter of {n} ranks is not computed, at most that of {MAX_DIAMETER_WORLD_SIZE} is; use fewer ranks"
        )
    rounds = repeated_rounds(topology)
    links, ranks = _Links(rounds), np.arange(n)
    heard = np.zeros((n, (n + 63) // 64), dtype=np.uint64)  # row i: one bit for each rank that i has heard of
    heard[ranks, ranks // 64] = np.uint64(1) << (ranks % 64).astype(np.uint64)
    everybody = np.bitwise_or.reduce(heard, axis=0)
    for distance in range(min(n, _MOST_SWEEPS)):
        if bool((heard == everybody).all()):
            return distance
        farther = heard.copy()
        links.spread(heard, farther)
        if np.array_equal(farther, heard):
            return None
        heard = farther
    return _deepest_search(rounds)


def _deepest_search(rounds: list[Round]) -> int | None:
    """Return the depth of the deepest of all breadth-first searches: cheaper than sets where distances are long."""
    from scipy import sparse

    n, edges = rounds[0].world_size, [round_.edges() for round_ in rounds]
    ends = np.concatenate([readers for readers, _, _ in edges]), np.concatenate([senders for _, senders, _ in edges])
    graph = sparse.coo_array((np.ones(len(ends[0])), ends), shape=(n, n)).tocsr()
    deepest = 0
    for rank in range(n):
        order, predecessors = sparse.csgraph.breadth_first_order(graph, rank)
        if len(order) < n:
            return None
        node, depth, found_from = int(order[-1]), 0, predecessors.tolist()
        while node != rank:
            node, depth = found_from[node], depth + 1
        deepest = max(deepest, depth)
    return deepest


class _Links:
    """The edges of some rounds together, with a hub for every uniform group of three or more instead of its pairs."""

    def __init__(self, rounds: list[Round]) -> None:
        n, none = rounds[0].world_size, np.empty(0, dtype=np.int64)
        keys, groups = [none], dict[tuple[int, ...], None]()
        for round_ in rounds:
            large = [group for group in round_.uniform_groups or () if len(group) > 2]
            if large:
                groups.update(dict.fromkeys(group for group in round_.uniform_groups or () if len(group) > 1))
            else:
                readers, senders, _ = round_.edges()
                keys.append(readers.astype(np.int64) * n + senders)
        rising = np.sort(np.concatenate(keys))
        self.readers, self.senders = np.divmod(rising[np.diff(rising, prepend=-1) > 0], n)
        self.num_hubs = len(groups)
        self.members = np.concatenate([none, *(np.array(group, dtype=np.int64) for group in groups)])
        self.hubs = np.repeat(np.arange(len(groups)), [len(group) for group in groups])

    def spread(self, heard: npt.NDArray[np.uint64], farther: npt.NDArray[np.uint64]) -> None:
        """Add to ``farther`` what each rank hears of."""
        _collect(farther, self.readers, heard, self.senders)
        if self.num_hubs:
            heard_by_hub = np.zeros((self.num_hubs, heard.shape[1]), dtype=np.uint64)
            _collect(heard_by_hub, self.hubs, heard, self.members)
            by_member = np.argsort(self.members, kind="stable")
            _collect(farther, self.members[by_member], heard_by_hub, self.hubs[by_member])


def _collect(into: npt.NDArray[np.uint64], readers: IntArray, sets: npt.NDArray[np.uint64], senders: IntArray) -> None:
    """Add to the set of each reader those of its senders; edges come by rising reader."""
    block = max(1, _BLOCK_BYTES // sets[0].nbytes)
    for first in range(0, len(readers), block):
        reader = readers[first : first + block]
        starts = np.flatnonzero(np.diff(reader, prepend=-1))
        into[reader[starts]] |= np.bitwise_or.reduceat(sets[senders[first : first + block]], starts)
