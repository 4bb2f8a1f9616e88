"""Gossip-PGA: gossip with a periodic exact average."""

from gossip.algorithms.base import Form
from gossip.algorithms.outer_steps import Periodic
from topologies import Topology


class GossipPGA(Periodic):
    r"""Gossip with periodic global averaging: every H-th exchange is the exact average over all ranks.

    .. math::
        x_i(t+1) = \sum_j W_t[i,j]\, x_j(t) + u_i(t), \qquad W_t = J/n \text{ where } H \text{ divides } t + 1

    Where a topology mixes slowly, such as a ring of many ranks, this bounds how far the replicas drift apart. It is
    adapt while communicating, or adapt then combine, on :meth:`topologies.Topology.averaged_every`; every other
    algorithm can run on such a schedule as well.

    Sends one message per step, and in every H-th step what an all-reduce sends, two thirds of a message to two
    messages; keeps nothing. Works with any doubly stochastic W.

    Parameters
    ----------
    period : int
        H, the number of steps from one average to the next, at least 1.
    form : str
        "awc": the messages take the whole next iteration; "atc": they are awaited before the next forward pass.

    References
    ----------
    Chen, Yuan, Zhang, Pan, Xu and Yin, "Accelerating gossip SGD with periodic global averaging", ICML 2021, algorithm
    1.
    """

    unclipped_because = "needs averages that are exact"

    def __init__(self, period: int = 16, form: Form = "awc") -> None:
        super().__init__(period, form)

    def schedule(self, topology: Topology) -> Topology:
        return topology.averaged_every(self.period)
