"""The network of a simulated run."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from gossip.simulation.simulation_checks import check_amount
from topologies.validation import check_integer


@dataclass(frozen=True)
class Cluster:
    """Nodes with one link each, and ranks that share it: an alpha-beta model of the network.

    A message of b bytes takes ``latency + b / bandwidth``. Every node has one link to a switch that holds nobody up,
    equally fast in both directions at once, and shared by all messages of its ranks. Ranks ``m L .. m L + L - 1`` are
    node m, for L = ``local_size``.

    Parameters
    ----------
    num_nodes : int
    local_size : int
        Ranks per node.
    latency_us : float
        Microseconds between two nodes, from the moment at which both ends of a small message are posted.
    bandwidth_gbps : float
        Gigabits per second of a node's link, each way; ``math.inf`` for a network that costs nothing.
    local_latency_us, local_bandwidth_gbps : float
        The same between two ranks of one node; the bandwidth is each rank's own.
    shares_memory : bool
        Whether ranks of a node read each other's parameters where they lie, as gossip does on a CPU: values from
        64 KiB on, uncompressed. Gradients are sent all the same.

    Raises
    ------
    ValueError, TypeError
        A number is out of range, or none.

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
            check_amount(name, getattr(self, name))
        for name in ("bandwidth_gbps", "local_bandwidth_gbps"):
            check_amount(name, getattr(self, name), positive=True, finite=False)

    @property
    def world_size(self) -> int:
        """Number of ranks n."""
        return self.num_nodes * self.local_size

    @property
    def seconds_per_byte(self) -> float:
        """Of a node's link, one way."""
        return 8e-9 / self.bandwidth_gbps

    @property
    def local_seconds_per_byte(self) -> float:
        """Within a node."""
        return 8e-9 / self.local_bandwidth_gbps
