"""Factored gossip: every rank makes outer steps of its own, and anchors are mixed beside the next local steps."""

from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Form, add_
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.outer_steps import ANCHOR, Nesterov, OuterFactory, OuterSteps
from topologies import Topology
from topologies.compositions import in_bursts
from topologies.validation import check_integer


class FactoredGossip(OuterSteps):
    r"""DiLoCo whose outer steps are each rank's own, while anchors are mixed as plain gossip would mix values.

    A rank starts from its own anchor :math:`a_i` and makes H steps with its own optimizer, which end at :math:`x_i`.
    Then, with the outer rate :math:`\alpha` and the outer momentum :math:`\mu`:

    .. math::
        \Delta_i = a_i - x_i, \qquad v_i \leftarrow \mu\, v_i + \Delta_i, \qquad
        u_i = -\alpha\, (\Delta_i + \mu\, v_i)

    Anchors are then mixed, in R rounds of the topology, of which each moves a rank's anchor and its values alike,
    whatever local steps it has made meanwhile:

    .. math::
        a_i \leftarrow a_i + u_i, \quad x_i \leftarrow a_i, \qquad \text{R times}\quad
        d_i = \sum_j W_{ij}\, a_j - a_i, \quad a_i \leftarrow a_i + d_i, \quad x_i \leftarrow x_i + d_i

    Since an anchor does not change but by mixing, nothing that is mixed is stale. In the form "awc" the messages of a
    round are on their way during ``overlap`` local steps, and the next round follows; in "atc" they are awaited before
    the next forward pass, so that the rounds are one local step apart. Outer step s is followed by the R rounds from
    (s + 1) R - 1 on. On "complete" the form "atc" is DiLoCo: only the velocities differ between ranks, and their mean
    is DiLoCo's.

    Local steps that are made before anchors are mixed begin where ranks differ, which costs much where data do. Choose
    ``overlap`` as small as the links allow, and a topology that is exact after few rounds: "one_peer_exponential" takes
    three on 8 ranks, and "hyper_hypercube" with k=3 takes two on 16.

    Sends R messages every H steps, and keeps two tensors per bucket. Works with any doubly stochastic W. Use it where
    links are too slow for a message per step, and no collective over all ranks is reliable.

    Parameters
    ----------
    period : int
        H, the number of steps from one outer step to the next, at least 1.
    outer_lr : float
        The outer rate, above 0.
    outer_momentum : float
        The outer momentum, at least 0 and below 1.
    form : str
        "awc": mixed beside the next local steps; "atc": awaited before the next forward pass.
    outer : callable, optional
        The outer optimizer in place of this one, as for :class:`DiLoCo`, with the gradient :math:`\Delta_i`.
    rounds : int
        R, at least 1.
    overlap : int
        The number of steps that the messages of a round have to arrive in the form "awc", at least 1. All rounds must
        fit into H.

    References
    ----------
    Hewa Koneputugodage et al., 2026, arXiv 2606.22768.
    """

    _constants = ("period", "rounds", "overlap", "outer_lr", "outer_momentum")

    def __init__(
        self,
        period: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        form: Form = "awc",
        outer: OuterFactory | None = None,
        rounds: int = 1,
        overlap: int = 1,
    ) -> None:
        super().__init__(period, form, outer_lr, outer_momentum)
        self.rounds = check_integer("rounds", rounds, minimum=1)
        self.overlap = check_integer("overlap", overlap, minimum=1)
        if form == "atc" and overlap > 1:
            raise ValueError(f'overlap={overlap}: form="atc" awaits messages before the next forward pass; pass 1')
        if rounds * overlap > period:
            raise ValueError(
                f"rounds={rounds} of overlap={overlap} steps take more than the {period} steps of a period; reduce them"
            )
        own = Nesterov(self.outer_lr, self.outer_momentum)
        self._step_by(outer, own, "own", outer_lr=outer_lr, outer_momentum=outer_momentum)

    def schedule(self, topology: Topology) -> Topology:
        return in_bursts(topology, self.period, self.rounds, self.overlap)

    def is_exchanged(self, bucket: int, step: int) -> bool:
        del bucket
        return step + 1 >= self.period  # before, all anchors are equal

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        return {VALUES: bucket.kept[ANCHOR].to(bucket.values.dtype)}

    def updated(self, bucket: BucketView) -> None:
        if self._ends_period(bucket.round_index):
            anchor = bucket.kept[ANCHOR]
            self._outer.step_(bucket, anchor - bucket.values)
            bucket.values.copy_(anchor)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        difference = got[VALUES].difference
        bucket.kept[ANCHOR].add_(difference)
        add_(bucket.values, difference)
