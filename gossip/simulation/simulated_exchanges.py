"""How long the messages of a round take, and which ranks wait for which."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gossip.communication.host.worker_threads import WINDOW_BYTES
from gossip.exchange.distributed_transport import PIECE_BYTES
from gossip.simulation.cluster import Cluster
from topologies import Round
from topologies.analysis.connectivity import all_reduce_rings
from topologies.matrix_storage import FloatArray, IntArray

Mask = npt.NDArray[np.bool_]


class Traffic(NamedTuple):
    """The edges of a round, and the traffic over each, in ``messages`` of the bucket's size. Shape ``[edges]``."""

    senders: IntArray
    receivers: IntArray
    messages: FloatArray


@dataclass(frozen=True)
class ExchangePlan:
    """One round between some ranks on a cluster, for messages of any size.

    A rank's messages start when it and all ranks that it is coupled with have posted theirs. All messages that leave or
    enter a node in the round share its link equally, and a rank's messages are as fast as those of the slowest rank
    that it is coupled with: they are sent in pieces, and the next piece is posted when the previous one has been
    received.

    Attributes
    ----------
    takes_part : array of bool, [n]
        Which ranks have a peer.
    seconds_per_byte : array, [n]
        The time per byte of the bucket's size.
    latency_s : array, [n]
        The latency between the rank and the most distant of its peers.
    coupling : Groups or Neighbourhoods
        Which ranks wait for which.
    """

    takes_part: Mask
    seconds_per_byte: FloatArray
    latency_s: FloatArray
    coupling: Groups | Neighbourhoods

    def run(self, posted_s: FloatArray, num_bytes: float) -> tuple[FloatArray, FloatArray]:
        """Return when each rank's messages have been sent, and when those for it have arrived, shape ``[n]`` each.

        Parameters
        ----------
        posted_s
            When each rank is ready to exchange, shape ``[n]``; irrelevant for ranks that do not take part.
        """
        pauses_s = (self.coupling.num_turns(num_bytes) - 1.0) * self.latency_s
        sent_s = self.coupling.latest(posted_s, num_bytes) + pauses_s + self.seconds_per_byte * num_bytes
        return sent_s, sent_s + self.latency_s

    def ask(self, posted_s: FloatArray, num_bytes: float) -> tuple[FloatArray, FloatArray]:
        """Return the same if each rank's peer replies as soon as it is asked, whatever it is doing."""
        one_way_s = self.seconds_per_byte * num_bytes
        return posted_s + one_way_s, posted_s + 2 * (one_way_s + self.latency_s)


class Groups:
    """Ranks that wait for all members of their group and for no other rank: pairs, and groups that all-reduce.

    Parameters
    ----------
    turns : sequence of int
        By group: the number of successive messages, each sent after the previous one has arrived.
    """

    def __init__(self, groups: Sequence[tuple[int, ...]], turns: Sequence[int], world_size: int) -> None:
        sizes = np.fromiter(map(len, groups), np.int64, count=len(groups))
        self._order = np.fromiter(itertools.chain.from_iterable(groups), np.int64, count=int(sizes.sum()))
        self._starts = np.cumsum(sizes) - sizes
        self._groups_of = np.repeat(np.arange(len(groups)), sizes)
        self._turns = np.ones(world_size)
        self._turns[self._order] = np.repeat(turns, sizes)

    def latest(self, values: FloatArray, num_bytes: float) -> FloatArray:  # noqa: ARG002
        return self.latest_of_peers(values)

    def latest_of_peers(self, values: FloatArray) -> FloatArray:
        """Return the largest value in each rank's group, shape ``[n]``; a rank in no group keeps its own."""
        latest = values.copy()
        latest[self._order] = np.maximum.reduceat(values[self._order], self._starts)[self._groups_of]
        return latest

    def num_turns(self, num_bytes: float) -> FloatArray:  # noqa: ARG002
        """Return the number of successive messages, shape ``[n]``."""
        return self._turns


class Neighbourhoods:
    """Ranks that wait for their peers, these for theirs, and so on, as far as the pieces of a message reach.

    A rank posts the next piece to all its peers only when the previous pieces have been sent. A late rank therefore
    delays its peers at once, their peers one piece later, and, if messages are long, ranks that are many edges away.

    Parameters
    ----------
    senders, receivers : array, [edges]
        The ranks at the two ends of each edge.
    """

    def __init__(self, senders: IntArray, receivers: IntArray, world_size: int) -> None:
        everybody = np.arange(world_size)
        one = np.concatenate((senders, receivers, everybody))
        other = np.concatenate((receivers, senders, everybody))
        ranks, self._peers = np.divmod(np.unique(one * world_size + other), world_size)
        self._starts = np.searchsorted(ranks, everybody)
        most_messages = np.bincount(np.concatenate((senders, receivers)), minlength=1).max()
        self._pieces_under_way = max(1, WINDOW_BYTES // (PIECE_BYTES * int(most_messages)))

    def latest(self, values: FloatArray, num_bytes: float) -> FloatArray:
        """Return the largest value that delays each rank, shape ``[n]``."""
        for _ in range(math.ceil(num_bytes / (self._pieces_under_way * PIECE_BYTES))):
            latest = self.latest_of_peers(values)
            if np.array_equal(latest, values):
                break
            values = latest
        return values

    def num_turns(self, num_bytes: float) -> float:
        """Return the number of successive pieces; with two in flight the link never pauses."""
        return math.ceil(num_bytes / PIECE_BYTES) if self._pieces_under_way == 1 else 1.0

    def latest_of_peers(self, values: FloatArray) -> FloatArray:
        """Return the largest value of each rank and its peers, shape ``[n]``."""
        return np.maximum.reduceat(values[self._peers], self._starts)


def plan_exchange(
    round_: Round, cluster: Cluster, *, all_reduces: Collection[tuple[int, ...]] = (), reads_memory: bool = False
) -> ExchangePlan | None:
    """Return the plan of a round, or None if nothing is sent.

    Parameters
    ----------
    all_reduces : collection of tuple of int
        The uniform groups that exchange by ring all-reduce in the order of their ranks; all others use point-to-point
        messages.
    reads_memory : bool
        Whether messages between two ranks of a node are read in place instead of being sent.
    """
    if round_.is_identity:
        return None
    n = cluster.world_size
    if round_.uniform_groups is None:
        receivers, senders, _ = round_.edges()
        traffic = _messages(senders, receivers, cluster, reads_memory)
        return _plan(Neighbourhoods(senders, receivers, n), traffic, cluster)
    groups = [group for group in round_.uniform_groups if len(group) > 1]
    rings = {group for group in groups if group in all_reduces and len(group) > 2}
    edges = [pair for group in groups if group not in rings for pair in itertools.permutations(group, 2)]
    senders, receivers = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    in_rings, from_rings, sizes = all_reduce_rings(tuple(rings))
    of_rings = Traffic(from_rings, in_rings, 2.0 * (sizes - 1) / sizes)
    parts = [of_rings, _messages(senders, receivers, cluster, reads_memory)]
    turns = [2 * (len(group) - 1) if group in rings else 1 for group in groups]
    coupling = Groups(groups, turns, n)
    return _plan(coupling, Traffic(*map(np.concatenate, zip(*parts, strict=True))), cluster)


def _messages(senders: IntArray, receivers: IntArray, cluster: Cluster, reads_memory: bool) -> Traffic:
    """Return the traffic of whole messages from rank to rank."""
    amounts = np.ones(len(senders))
    if reads_memory:
        amounts[senders // cluster.local_size == receivers // cluster.local_size] = 0.0
    return Traffic(senders, receivers, amounts)


def _plan(coupling: Groups | Neighbourhoods, traffic: Traffic, cluster: Cluster) -> ExchangePlan:
    n, ends = cluster.world_size, (traffic.senders, traffic.receivers)
    from_node, to_node = (ranks // cluster.local_size for ranks in ends)
    crosses = from_node != to_node
    by_node = [
        np.bincount(nodes[crosses], weights=traffic.messages[crosses], minlength=cluster.num_nodes)
        for nodes in (from_node, to_node)
    ]
    inside = [np.bincount(ranks[~crosses], weights=traffic.messages[~crosses], minlength=n) for ranks in ends]
    takes_part, uses_link = np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
    for ranks in ends:
        takes_part[ranks] = True
        uses_link[ranks[crosses]] = True
    out_s, into_s = cluster.seconds_per_byte
    link = np.maximum(by_node[0] * out_s, by_node[1] * into_s)
    if (pair_s := cluster.pair_seconds_per_byte) is not None:
        pairs = from_node[crosses] * cluster.num_nodes + to_node[crosses]
        carried = np.bincount(pairs, weights=traffic.messages[crosses], minlength=pair_s.size).reshape(pair_s.shape)
        link = np.maximum(link, (carried * pair_s).max(1))  # who receives waits for the sender
    link = np.repeat(link, cluster.local_size)
    own = np.maximum(np.where(uses_link, link, 0.0), np.maximum(*inside) * cluster.local_seconds_per_byte)
    latency_s = np.where(uses_link, cluster.latency_us, cluster.local_latency_us) * 1e-6
    return ExchangePlan(takes_part, coupling.latest_of_peers(own), coupling.latest_of_peers(latency_s), coupling)
