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
_STARTS_TIMES_NODES = 512


def placement(topology: Topology, cluster: Cluster) -> tuple[int, ...]:
    """Return the order of the ranks in which a topology's messages take the least time on a cluster. Local.

    It is for :meth:`topologies.Topology.permuted`. Nodes change places as wholes: the ranks of a node stay neighbours.
    The criterion is the sum, over the rounds of a period, of the time that the slowest node of a round takes for its
    messages; among equals it is that of all nodes. Up to 7 nodes all orders are compared, with more those that are
    found by exchanging two nodes as long as that helps, from this order and others that a seed draws. The order of the
    ranks as they are is returned if none is better, as it is where ``bandwidth_gbps`` is a number.

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
        sent, everyone = _sent(topology, cluster), map(np.array, itertools.permutations(range(n)))
        orders = everyone if n <= _MOST_TRIED else _local_minima(sent, pair_s, cluster)
        best = min(orders, key=lambda order: _cost(sent, order, pair_s, cluster.seconds_per_byte))
    ranks = best[:, None] * cluster.local_size + np.arange(cluster.local_size)
    return tuple(ranks.ravel().tolist())


def _sent(topology: Topology, cluster: Cluster) -> FloatArray:
    """Return how many messages go from place to place in each round that exchanges, ``[rounds, places, places]``."""
    num_rounds = _MOST_ROUNDS if topology.period is None else min(topology.period, _MOST_ROUNDS)
    rounds = (topology.round(topology.warmup + t) for t in range(num_rounds))
    sent = np.zeros((num_rounds, cluster.num_nodes, cluster.num_nodes))
    for messages, round_ in zip(sent, rounds, strict=True):
        receivers, senders, _ = round_.edges()
        np.add.at(messages, (senders // cluster.local_size, receivers // cluster.local_size), 1.0)
        np.fill_diagonal(messages, 0.0)
    return sent[sent.any((1, 2))]


def _cost(sent: FloatArray, order: IntArray, pair_s: FloatArray, link_s: FloatArray) -> tuple[float, float]:
    """Return the time per byte of all rounds by their slowest node, and that summed over nodes, in seconds."""
    links = np.maximum(sent.sum(2) * link_s[0, order], sent.sum(1) * link_s[1, order])
    nodes = np.maximum(links, (sent * pair_s[np.ix_(order, order)]).max(2, initial=0.0))
    return round(float(nodes.max(1, initial=0.0).sum()), 15), round(float(nodes.sum()), 15)


def _local_minima(sent: FloatArray, pair_s: FloatArray, cluster: Cluster) -> Iterator[IntArray]:
    rng, n = np.random.default_rng(0), cluster.num_nodes
    yield np.arange(n)
    for start in range(max(1, _STARTS_TIMES_NODES // n)):
        order = rng.permutation(n) if start else np.arange(n)
        cost, is_better = _cost(sent, order, pair_s, cluster.seconds_per_byte), True
        while is_better:
            is_better = False
            for one, other in itertools.combinations(range(n), 2):
                order[[one, other]] = order[[other, one]]
                swapped = _cost(sent, order, pair_s, cluster.seconds_per_byte)
                if swapped < cost:
                    cost, is_better = swapped, True
                else:
                    order[[one, other]] = order[[other, one]]
        yield order
