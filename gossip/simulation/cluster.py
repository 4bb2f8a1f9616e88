"""The network of a simulated run."""

from dataclasses import KW_ONLY, dataclass

from topologies import Topology
from topologies.validation import check_integer, check_real


@dataclass(frozen=True)
class Cluster:
    """Nodes with one link each, shared by the node's ranks: an alpha-beta model of the network.

    A message of b bytes takes ``latency + b / bandwidth``. Every node has one link to a non-blocking switch, equally
    fast in both directions at once, and shared by all messages of its ranks. Ranks ``m L .. m L + L - 1`` form node m,
    for L = ``local_size``.

    Parameters
    ----------
    num_nodes : int
        The number of nodes.
    local_size : int
        The number of ranks per node.
    latency_us : float
        The latency between two nodes in microseconds, from the moment at which both ends of a small message are posted.
    bandwidth_gbps : float
        The bandwidth of a node's link in gigabits per second, each way; ``math.inf`` for a network without cost.
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
    bandwidth_gbps: float = 10.0
    local_latency_us: float = 5.0
    local_bandwidth_gbps: float = 100.0
    shares_memory: bool = False

    def __post_init__(self) -> None:
        check_integer("num_nodes", self.num_nodes, minimum=1)
        check_integer("local_size", self.local_size, minimum=1)
        for name in ("latency_us", "local_latency_us"):
            check_real(name, getattr(self, name), "at least 0 and finite", example=50.0)
        for name in ("bandwidth_gbps", "local_bandwidth_gbps"):
            check_real(name, getattr(self, name), "above 0", example=10.0)

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

    @property
    def seconds_per_byte(self) -> float:
        """The time per byte on a node's link, one way, in seconds."""
        return 8e-9 / self.bandwidth_gbps

    @property
    def local_seconds_per_byte(self) -> float:
        """The time per byte within a node, in seconds."""
        return 8e-9 / self.local_bandwidth_gbps
