"""The network of a simulated run."""

import functools
import itertools
import reprlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real

import numpy as np

from topologies import Topology
from topologies.matrix_storage import FloatArray
from topologies.validation import check_integer, check_real


@dataclass(frozen=True)
class Cluster:
    """Nodes with one link each, shared by the node's ranks: an alpha-beta model of the network.

    A message of b bytes takes ``latency + b / bandwidth``. Every node has one link to a switch, equally fast in both
    directions at once, and shared by all messages of its ranks. The switch is non-blocking, unless there is a bandwidth
    for each pair of nodes. Ranks ``m L .. m L + L - 1`` form node m, for L = ``local_size``.

    Parameters
    ----------
    num_nodes : int
        The number of nodes.
    local_size : int
        The number of ranks per node.
    latency_us : float
        The latency between two nodes in microseconds, from the moment at which both ends of a small message are posted.
    bandwidth_gbps : float or matrix of float, [num_nodes, num_nodes]
        The bandwidth of a node's link in gigabits per second, each way; ``math.inf`` for a network without cost. A
        matrix has the bandwidth from the node of the row to that of the column, and a node's link is as fast, each way,
        as to and from its fastest peer; the diagonal does not matter.
    local_latency_us, local_bandwidth_gbps : float
        The same between two ranks of one node; each rank has this bandwidth to itself.
    shares_memory : bool
        Whether ranks of a node read each other's parameters in place, as gossip does on a CPU: uncompressed values of
        at least 64 KiB. Gradients are always sent.

    Raises
    ------
    ValueError, TypeError
        A number is out of range, or an argument is not a number.

    Examples
    --------
    >>> Cluster(4, 8, latency_us=20, bandwidth_gbps=25).world_size
    32
    """

    num_nodes: int
    local_size: int = 1
    _: KW_ONLY
    latency_us: float = 50.0
    bandwidth_gbps: float | Sequence[Sequence[float]] = 10.0
    local_latency_us: float = 5.0
    local_bandwidth_gbps: float = 100.0
    shares_memory: bool = False

    def __post_init__(self) -> None:
        check_integer("num_nodes", self.num_nodes, minimum=1)
        check_integer("local_size", self.local_size, minimum=1)
        for name in ("latency_us", "local_latency_us"):
            check_real(name, getattr(self, name), "at least 0 and finite", example=50.0)
        check_real("local_bandwidth_gbps", self.local_bandwidth_gbps, "above 0", example=10.0)
        if not np.iterable(self.bandwidth_gbps):
            check_real("bandwidth_gbps", self.bandwidth_gbps, "above 0", example=10.0)
            return
        rows = [tuple(row) if np.iterable(row) else () for row in self.bandwidth_gbps]
        if [*map(len, rows)] != [self.num_nodes] * self.num_nodes:
            raise ValueError(
                f"bandwidth_gbps must be a number, or a matrix of one row and column for each of the {self.num_nodes} "
                f"nodes, got {reprlib.repr(self.bandwidth_gbps)}"
            )
        matrix = np.zeros((self.num_nodes, self.num_nodes))
        for i, j in itertools.permutations(range(self.num_nodes), 2):
            matrix[i, j] = check_real(f"bandwidth_gbps[{i}][{j}]", rows[i][j], "above 0", example=10.0)
        object.__setattr__(self, "bandwidth_gbps", tuple(map(tuple, matrix.tolist())))  # frozen, and can be hashed

    @property
    def world_size(self) -> int:
        """The number of ranks n."""
        return self.num_nodes * self.local_size

    def check_topology(self, name: str, topology: Topology) -> None:
        """Refuse the argument ``name`` if it is a topology for another number of ranks."""
        if topology.world_size != self.world_size:
            raise ValueError(
                f"{name} is a topology for {topology.world_size} ranks, but the cluster has {self.num_nodes} x "
                f"{self.local_size} = {self.world_size}; build it for {self.world_size}"
            )

    @functools.cached_property
    def pair_seconds_per_byte(self) -> FloatArray | None:
        """The time per byte from node to node, in seconds, ``[num_nodes, num_nodes]``; None if all are equal."""
        if isinstance(self.bandwidth_gbps, Real):
            return None
        matrix = np.array(self.bandwidth_gbps)
        np.fill_diagonal(matrix, np.inf)
        return 8e-9 / matrix

    @functools.cached_property
    def seconds_per_byte(self) -> FloatArray:
        """The time per byte out of each node and into it, in seconds, ``[2, num_nodes]``."""
        if (pairs := self.pair_seconds_per_byte) is None:
            return np.full((2, self.num_nodes), 8e-9) / np.asarray(self.bandwidth_gbps, dtype=np.float64)
        fastest = np.where(np.eye(self.num_nodes), np.inf, pairs)
        fastest = np.array([fastest.min(1), fastest.min(0)])
        return np.where(np.isfinite(fastest), fastest, 0.0)  # a single node has no peer

    @property
    def bandwidth_text(self) -> str:
        """The bandwidth between nodes in Gbit/s in words, such as "10" or, for a matrix, "0.2 to 10"."""
        rates = np.asarray(self.bandwidth_gbps)
        if rates.ndim == 0 or self.num_nodes == 1:
            return f"{rates.max():.3g}"
        between = rates[~np.eye(self.num_nodes, dtype=np.bool_)]
        return f"{between.min():.3g} to {between.max():.3g}"

    @property
    def local_seconds_per_byte(self) -> float:
        """The time per byte within a node, in seconds."""
        return 8e-9 / self.local_bandwidth_gbps
