"""DiLoCo: many local steps between averages, each average being one step of an outer optimizer."""

from collections.abc import Mapping
from typing import Literal

import torch

from gossip.algorithms.base import VALUES, Form, Requires
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.outer_steps import ANCHOR, Nesterov, OuterFactory, OuterSteps

_SAMPLES = "samples"
_NO_SAMPLES = 1e-12  # so that ranks that have all seen none count equally


class DiLoCo(OuterSteps):
    r"""Nesterov momentum over the movement of all ranks in H local steps.

    All ranks start from the anchor :math:`a` and make H steps with their own optimizers, which end at :math:`x_i`.
    Then, with the outer rate :math:`\alpha` and the outer momentum :math:`\mu`:

    .. math::
        \Delta = a - \frac1n \sum_i x_i, \qquad v \leftarrow \mu\, v + \Delta, \qquad
        a \leftarrow a - \alpha\, (\Delta + \mu\, v), \qquad x_i \leftarrow a

    With H = 1, :math:`\alpha = 1` and :math:`\mu = 0` this is an average after every step. The form "atc" awaits the
    average before the next forward pass; "awc" gives it the whole next iteration, whose gradients are still computed at
    :math:`x_i`.

    With ``weighted``, the mean is :math:`\sum_i N_i x_i / \sum_i N_i`, with :math:`N_i` the samples of rank i since the
    last average (:meth:`gossip.GossipDataParallel.weigh`).

    Sends one message every H steps, ``weighted`` one scalar more, and keeps two tensors per bucket. Every round must be
    the exact average, so the topology must be complete. Use it where links are so slow that a message per step cannot
    be hidden.

    Parameters
    ----------
    period : int
        H, the number of steps from one average to the next, at least 1.
    outer_lr : float
        The outer rate, above 0.
    outer_momentum : float
        The outer momentum, at least 0 and below 1.
    form : str
        When the average is awaited, "atc" or "awc".
    weighted : bool
        Whether ranks count by their samples.
    outer : callable, optional
        The outer optimizer in place of this one: a factory of any that updates each element by itself, such as
        ``partial(torch.optim.SGD, lr=0.7, momentum=0.9)``. Its gradient is :math:`\Delta`, and its state is kept per
        bucket, in place of the velocity. Leave ``outer_lr`` and ``outer_momentum`` out with it.

    References
    ----------
    Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, algorithm 1.
    """

    unclipped_because = "needs averages that are exact"
    requires = Requires(exact=True, prompt=True)
    keeps_numbers = True
    _scope: Literal["own", "common"] = "common"
    _constants: tuple[str, ...] = ("period", "outer_lr", "outer_momentum")

    def __init__(
        self,
        period: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        form: Form = "atc",
        weighted: bool = False,
        outer: OuterFactory | None = None,
    ) -> None:
        super().__init__(period, form, outer_lr, outer_momentum)
        own = Nesterov(self.outer_lr, self.outer_momentum)
        self._step_by(outer, own, self._scope, outer_lr=outer_lr, outer_momentum=outer_momentum)
        self._weigh(weighted, _SAMPLES)

    def averaged(self, bucket: BucketView) -> None:
        super().averaged(bucket)
        self._count_anew(bucket)

    def _count_anew(self, bucket: BucketView) -> None:
        if _SAMPLES in bucket.numbers:
            bucket.numbers[_SAMPLES].fill_(_NO_SAMPLES)

    def updated(self, bucket: BucketView) -> None:
        if self.weighted:
            bucket.numbers[_SAMPLES].add_(bucket.samples)

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        if not self.weighted:
            return {VALUES: bucket.values}
        return {VALUES: (bucket.values * bucket.numbers[_SAMPLES]).to(bucket.values.dtype)}

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        mean = self.message(bucket)[VALUES] + got[VALUES].difference  # of what was sent, as it was rounded
        if self.weighted:
            mean = (mean / (bucket.numbers[_SAMPLES] + got[_SAMPLES].difference)).to(mean.dtype)
            self._count_anew(bucket)
        self._outer.step_(bucket, bucket.kept[ANCHOR] - mean)
        bucket.values.copy_(bucket.kept[ANCHOR])
