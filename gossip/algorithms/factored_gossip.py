"""Factored gossip: every rank makes outer steps of its own; anchors are mixed beside the local steps or after them."""

from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Form, Kept, add_
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.outer_optimizers import ANCHOR, Nesterov, OuterFactory
from gossip.algorithms.outer_steps import OuterSteps
from topologies import Topology
from topologies.validation import check_integer, check_real

_MIXED = "mixed"


class FactoredGossip(OuterSteps):
    r"""DiLoCo whose outer steps are each rank's own, while anchors are mixed as plain gossip would mix values.

    A rank starts from its own anchor :math:`a_i` and makes H steps with its own optimizer, which end at :math:`x_i`.
    Then, with the outer rate :math:`\alpha` and the outer momentum :math:`\mu`:

    .. math::
        \Delta_i = a_i - x_i, \qquad v_i \leftarrow \mu\, v_i + \Delta_i, \qquad
        u_i = -\alpha\, (\Delta_i + \mu\, v_i)

    In the form "awc" the anchors are on their way during all H local steps, in which they do not change, so that
    nothing that is mixed is stale; in "atc" they are mixed after the outer step and awaited before the next forward
    pass:

    .. math::
        \text{awc:}\quad a_i \leftarrow \sum_j W_{ij}\, a_j + u_i, \qquad
        \text{atc:}\quad a_i \leftarrow \sum_j W_{ij}\, (a_j + u_j), \qquad x_i \leftarrow a_i

    Each is one of the two mixes of the paper. In the form "awc" there may be several rounds, one after the other, each
    with its share of the local steps: three on "one_peer_exponential" give 8 ranks the exact average. The exchange that
    follows outer step s uses round s of the topology; with R rounds they are the R from round (s + 1) R - 1 on. On
    "complete" the form "atc" is DiLoCo: only the velocities differ between ranks, and their mean is DiLoCo's.

    Sends R messages every H steps, and keeps two tensors per bucket, three in the form "awc". Works with any doubly
    stochastic W. Use it where links are too slow for a message per step, and no collective over all ranks is reliable.

    Parameters
    ----------
    period : int
        H, the number of steps from one outer step to the next, at least 1.
    outer_lr : float
        The outer rate, above 0.
    outer_momentum : float
        The outer momentum, at least 0 and below 1.
    form : str
        "awc": mixed beside the next H steps; "atc": awaited before the next forward pass.
    outer : callable, optional
        The outer optimizer in place of this one, as for :class:`DiLoCo`, with the gradient :math:`\Delta_i`.
    rounds : int
        R, the number of rounds by which the anchors are mixed, a divisor of H; 1 in the form "atc".

    References
    ----------
    Hewa Koneputugodage et al., 2026, arXiv 2606.22768.
    """

    _constants = ("period", "rounds", "outer_lr", "outer_momentum")

    def __init__(
        self,
        period: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        form: Form = "awc",
        outer: OuterFactory | None = None,
        rounds: int = 1,
    ) -> None:
        super().__init__(period, form)
        self.rounds = check_integer("rounds", rounds, minimum=1)
        if form == "atc" and rounds > 1:
            raise ValueError(f'rounds={rounds}: several are mixed beside local steps, as only form="awc" does; pass 1')
        if period % rounds:
            raise ValueError(f"rounds must divide the period, of {period} steps, into equal parts, got {rounds}")
        self.outer_lr = check_real("outer_lr", outer_lr, "above 0 and finite", example=0.7)
        self.outer_momentum = check_real("outer_momentum", outer_momentum, "at least 0 and below 1", example=0.5)
        own = Nesterov(self.outer_lr, self.outer_momentum)
        self._step_by(outer, own, "own", outer_lr=outer_lr, outer_momentum=outer_momentum)
        if form == "awc":
            self.overlap = period // rounds
            # Of what has been mixed the sum over ranks is zero.
            self.keeps = {**self.keeps, _MIXED: Kept("zero", "joint")}

    def schedule(self, topology: Topology) -> Topology:
        return topology.every(self.period // self.rounds)

    def is_exchanged(self, bucket: int, step: int) -> bool:
        del bucket
        return step + 1 >= self.period  # before, all anchors are equal

    def averaged(self, bucket: BucketView) -> None:
        super().averaged(bucket)
        if _MIXED in bucket.kept:
            bucket.kept[_MIXED].zero_()

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        if self._ends_period(bucket.round_index) or _MIXED not in bucket.kept:
            return super().message(bucket)
        mixed = bucket.kept[ANCHOR] + bucket.kept[_MIXED]
        return {VALUES: mixed.to(bucket.values.dtype)}

    def updated(self, bucket: BucketView) -> None:
        if not self._ends_period(bucket.round_index):
            return
        anchor = bucket.kept[ANCHOR]
        self._outer.step_(bucket, anchor - bucket.values)
        if _MIXED in bucket.kept:
            anchor.add_(bucket.kept[_MIXED])
            bucket.kept[_MIXED].zero_()
        bucket.values.copy_(anchor)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        difference = got[VALUES].difference
        if _MIXED in bucket.kept:
            bucket.kept[_MIXED].add_(difference)
        else:
            bucket.kept[ANCHOR].add_(difference)
            add_(bucket.values, difference)
