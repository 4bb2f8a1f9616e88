"""Which node takes which place of a topology, where the links between nodes differ."""

import itertools
from collections.abc import Iterator

import numpy as np

from gossip.simulation.cluster import Cluster
from topologies import Topology
from topologies.matrix_storage import FloatArray, IntArray

_MOST_ROUNDS = 64
"""Of a topology whose rounds do not repeat, or not sooner."""
_MOST_TRIED = 7
"""The number of nodes up to which all orders are tried."""
_MOST_COMPARED = 20_000  # orders, where not all are tried


def placement(topology: Topology, cluster: Cluster) -> tuple[int, ...]:
    """Return the order of the ranks in which a topology's messages take the least time on a cluster. Local.

    It is for :meth:`topologies.Topology.permuted`. Nodes change places as wholes: the ranks of a node stay neighbours.
    The criterion is the sum, over the rounds that exchange, of the time that the slowest node of a round takes for its
    messages; among equals it is that of all nodes. Each rank is counted as sending to each of its peers, as it does
    with compression; three or more ranks that average by an all-reduce send along a ring by their numbers, which no
    order of a topology changes: compare both orders by :func:`simulate_time` there.

    Up to 7 nodes all orders are compared; with more those that are found by exchanging two nodes as long as that helps,
    from orders in which nodes are dealt to the places like cards, and others that a seed draws: 20,000 orders, which
    takes some seconds. The order of the ranks as they are is returned if none is better, as it is where
    ``bandwidth_gbps`` is a number.

    Raises
    ------
    ValueError, TypeError
        The topology is for another number of ranks, or an argument is of another type.

    Examples
    --------
    Two racks, between which links have a tenth of the rate. By their order, both rounds cross them:

    >>> import topologies
    >>> rates = [[0, 10, 1, 1], [10, 0, 1, 1], [1, 1, 0, 10], [1, 1, 10, 0]]
    >>> cluster, topology = Cluster(4, bandwidth_gbps=rates), topologies.build("one_peer_exponential", 4)
    >>> placement(topology, cluster)
    (0, 2, 1, 3)
    """
    for name, given, kind in (("topology", topology, Topology), ("cluster", cluster, Cluster)):
        if not isinstance(given, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {given!r} ({type(given).__name__}); make one")
    cluster.check_topology("topology", topology)
    n, pair_s = cluster.num_nodes, cluster.pair_seconds_per_byte
    best = np.arange(n)
    if pair_s is not None:
        times = _Times(topology, cluster, pair_s)
        orders = map(np.array, itertools.permutations(range(n))) if n <= _MOST_TRIED else _local_minima(times, n)
        best = min(orders, key=times.of)
    ranks = best[:, None] * cluster.local_size + np.arange(cluster.local_size)
    return tuple(ranks.ravel().tolist())


class _Times:
    """The time per byte of the messages from place to place of a topology, by which node is in which place."""

    def __init__(self, topology: Topology, cluster: Cluster, pair_s: FloatArray) -> None:
        (self._out_s, self._into_s), self._pair_s = cluster.seconds_per_byte, pair_s
        n, last = cluster.num_nodes, topology.phases[-1].topology  # without its local steps, and what is before it
        num_rounds = _MOST_ROUNDS if last.period is None else min(last.period, _MOST_ROUNDS)
        messages = []
        for number in range(num_rounds):
            receivers, senders, _ = last.round(number).edges()
            from_place, to_place = senders // cluster.local_size, receivers // cluster.local_size
            messages.append(((number * n + from_place) * n + to_place)[from_place != to_place])
        keys, self._amounts = np.unique(np.concatenate(messages), return_counts=True)
        from_places, self._to = np.divmod(keys, n)
        rounds, self._from = np.divmod(from_places, n)
        self._senders, self._starts = np.unique(from_places, return_index=True)
        self._sent, self._received = (
            np.bincount(rounds * n + places, self._amounts, num_rounds * n).reshape(num_rounds, n)
            for places in (self._from, self._to)
        )

    def of(self, order: IntArray) -> tuple[float, float]:
        """Return the sum over rounds of the slowest node's, and of all nodes', in seconds; ``order`` is by place."""
        nodes = np.maximum(self._sent * self._out_s[order], self._received * self._into_s[order])
        if len(self._senders):
            pairs = np.maximum.reduceat(self._amounts * self._pair_s[order[self._from], order[self._to]], self._starts)
            nodes.ravel()[self._senders] = np.maximum(nodes.ravel()[self._senders], pairs)
        return round(float(nodes.max(1).sum()), 15), round(float(nodes.sum()), 15)


def _local_minima(times: _Times, n: int) -> Iterator[IntArray]:
    """Yield the order as it is, and orders in which no exchange of two nodes is better, as long as they may take."""
    rng, num_compared = np.random.default_rng(0), 0
    dealt = [np.arange(n).reshape(num_hands, -1).T.ravel() for num_hands in range(1, n) if n % num_hands == 0]
    yield dealt[0]
    starts = sorted(dealt, key=times.of)  # racks that are dealt to the places in turn
    while num_compared < _MOST_COMPARED:
        order = starts.pop(0).copy() if starts else rng.permutation(n)
        cost, is_better = times.of(order), True
        while is_better:
            is_better = False
            for one, other in itertools.combinations(range(n), 2):
                if (num_compared := num_compared + 1) > _MOST_COMPARED:
                    break
                order[[one, other]] = order[[other, one]]
                if (swapped := times.of(order)) < cost:
                    cost, is_better = swapped, True
                else:
                    order[[one, other]] = order[[other, one]]
        yield order
