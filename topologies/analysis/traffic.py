"""What a topology puts on the wire: messages and bytes per rank, of the busiest node and across the network."""

from dataclasses import dataclass

import numpy as np

from topologies.analysis.connectivity import all_reduce_rings, distinct_rounds
from topologies.analysis.consensus import consensus_rate
from topologies.matrix_storage import FloatArray, IntArray
from topologies.round import Round
from topologies.schedule import Schedule
from topologies.validation import check_local_size, check_real


@dataclass(frozen=True)
class RoundTraffic:
    """The traffic of one round, in messages of one model each.

    A uniform group of g ranks exchanges by a ring all-reduce in the order of its ranks: each sends ``2 (g - 1) / g``
    messages to the next one, in ``2 (g - 1)`` steps; all else goes point to point, one message and one step an edge.
    Ranks ``m L .. m L + L - 1`` are node m, for L ranks per node; what stays inside a node is not on the network.

    Attributes
    ----------
    sent
        Messages that each rank sends, shape ``[n]``.
    sent_by_node, received_by_node
        Messages that leave and enter each node, shape ``[nodes]``.
    steps
        Most steps of any rank, one after the other, of exchanges that use the network.
    """

    sent: FloatArray
    sent_by_node: FloatArray
    received_by_node: FloatArray
    steps: int

    @property
    def busiest_node(self) -> float:
        """Messages that leave or enter the busiest node, whichever is more."""
        return float(max(self.sent_by_node.max(), self.received_by_node.max()))


@dataclass(frozen=True)
class Traffic:
    """The traffic of a schedule over one period of exchanges (16 without a period); see :class:`RoundTraffic`.

    Attributes
    ----------
    rounds
        The traffic of each exchange.
    every
        An exchange takes place in every so many rounds.
    message_bytes
        Bytes of one message.
    num_communicators
        Distinct uniform groups of three and more ranks: what runs each of them as a small all-reduce needs so many.
    """

    rounds: tuple[RoundTraffic, ...]
    every: int
    message_bytes: float
    num_communicators: int

    @property
    def bytes_per_rank(self) -> float:
        """Bytes that a rank sends per round, the mean over ranks and rounds."""
        return self._mean([round_.sent.mean() for round_ in self.rounds])

    @property
    def network_bytes(self) -> float:
        """Bytes that all nodes together put on the network per round, the mean over rounds."""
        return self._mean([round_.sent_by_node.sum() for round_ in self.rounds])

    @property
    def max_node_bytes(self) -> float:
        """Bytes that leave or enter the busiest node in its busiest round."""
        return self.message_bytes * max(round_.busiest_node for round_ in self.rounds)

    def bytes_in(self, num_rounds: int) -> float:
        """Return the bytes that a rank sends in the first rounds after the warm-up, the mean over ranks."""
        return self._total([float(round_.sent.mean()) for round_ in self.rounds], num_rounds)

    def network_bytes_in(self, num_rounds: int) -> float:
        """Return the bytes that all nodes together put on the network in the first rounds after the warm-up."""
        return self._total([float(round_.sent_by_node.sum()) for round_ in self.rounds], num_rounds)

    def _total(self, messages: list[float], num_rounds: int) -> float:
        whole, rest = divmod(num_rounds // self.every, len(messages))
        return self.message_bytes * (whole * sum(messages) + sum(messages[:rest]))

    def _mean(self, messages: list[float]) -> float:
        return self.message_bytes * float(np.mean(messages)) / self.every


def traffic(topology: Schedule, *, message_bytes: float = 1.0, local_size: int = 1) -> Traffic:
    """Return what a topology sends, for messages of ``message_bytes`` and nodes of ``local_size`` ranks.

    A message is usually a model: 1.0 counts in models. ``local_size``, the ranks per node, divides the world size.

    Examples
    --------
    >>> found = traffic(topologies.build("ring", 8), message_bytes=100.0, local_size=4)
    >>> found.bytes_per_rank, found.max_node_bytes, found.network_bytes
    (200.0, 200.0, 400.0)
    """
    message_bytes = check_real("message_bytes", message_bytes, "at least 0 and finite", example=100e6)
    local_size = check_local_size(local_size, topology.world_size)
    rounds = distinct_rounds(topology, warmup=False)
    return Traffic(
        rounds=tuple(round_traffic(round_, local_size) for round_ in rounds),
        every=topology.phases[-1].every,
        message_bytes=message_bytes,
        num_communicators=len({group for round_ in rounds for group in round_.uniform_groups or () if len(group) > 2}),
    )


def rate_per_byte(topology: Schedule, *, message_bytes: float = 1.0) -> float:
    """Return the factor by which a disagreement shrinks in the long run for every byte that a rank sends.

    It is ``consensus_rate ** (1 / bytes per round)``; by default per message. 1.0 if nothing is sent.

    Examples
    --------
    >>> ring, exponential = topologies.build("ring", 64), topologies.build("exponential", 64)
    >>> rate_per_byte(exponential) < rate_per_byte(ring)
    True
    """
    sent = traffic(topology, message_bytes=message_bytes).bytes_per_rank
    return float(consensus_rate(topology) ** (1.0 / sent)) if sent else 1.0


def round_traffic(round_: Round, local_size: int = 1) -> RoundTraffic:
    """Return what one round sends, for nodes of ``local_size`` ranks."""
    n = round_.world_size
    local_size = check_local_size(local_size, n)
    if round_.uniform_groups is None:
        receivers, senders, _ = round_.edges()
        amount = steps = np.ones(len(senders))
    else:
        receivers, senders, sizes = all_reduce_rings(round_.uniform_groups)
        amount = 2.0 * (sizes - 1.0) / np.maximum(sizes, 1.0)
        steps = np.where(sizes > 2, 2.0 * (sizes - 1.0), 1.0)
    from_node, to_node = senders // local_size, receivers // local_size
    crosses = from_node != to_node
    num_nodes = n // local_size
    most_steps = steps[crosses].max(initial=0.0)  # a ring all-reduce keeps all members busy for as long
    if round_.uniform_groups is None:
        most_steps = max(np.bincount(ranks[crosses], minlength=1).max() for ranks in (senders, receivers))
    return RoundTraffic(
        sent=_total(senders, amount, n),
        sent_by_node=_total(from_node[crosses], amount[crosses], num_nodes),
        received_by_node=_total(to_node[crosses], amount[crosses], num_nodes),
        steps=int(most_steps),
    )


def _total(places: IntArray, amounts: FloatArray, num_places: int) -> FloatArray:
    return np.bincount(places, weights=amounts, minlength=num_places).astype(np.float64)
