"""GASLoC: many local steps between rounds of gossip, with a momentum over the movement from round to round."""

from collections.abc import Mapping

from gossip.algorithms.base import VALUES, Form, Kept
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.outer_steps import ANCHOR, OuterFactory, OuterOptimizer, OuterSteps

_BEFORE = "before"


class GASLoC(OuterSteps):
    r"""Gossip of what ranks have reached after H local steps, and momentum along how that moves from round to round.

    A rank starts from its own anchor :math:`a_i` and makes H steps with its own optimizer, which end at :math:`x_i`.
    Then, with the outer rate :math:`\eta` and the outer momentum :math:`\gamma`:

    .. math::
        z_i(s) = a_i(s) + \eta\, (x_i - a_i(s)), \qquad
        a_i(s+1) = \sum_j W_{ij}\, z_j(s) + \gamma\, \bigl(z_i(s) - z_i(s-1)\bigr), \qquad x_i \leftarrow a_i(s+1)

    where :math:`z_i(-1) = a_i(0)`. Outer step s uses round s of the topology; a rank without a partner makes it alone.
    With :math:`\gamma = 0` and :math:`\eta = 1` this is gossip every H steps. On "complete" the anchors are the exact
    average plus a momentum that stays each rank's own, so that it is not DiLoCo, whose momentum is common, unless
    :math:`\gamma = 0`: then it is DiLoCo without momentum and with outer rate :math:`\eta`.

    Sends one message every H steps, and keeps two tensors per bucket. Works with any doubly stochastic W. Use it where
    links are slow or differ, and where no collective over all ranks is reliable. In the first hundreds of steps
    momentum costs more than it gains, so :math:`\gamma` is small by default.

    Parameters
    ----------
    period : int
        H, the number of steps from one outer step to the next, at least 1.
    outer_lr : float
        The outer rate :math:`\eta`, above 0.
    outer_momentum : float
        The outer momentum :math:`\gamma`, at least 0 and below 1.
    form : str
        "atc": the messages are awaited before the next forward pass; "awc": they have the whole next iteration, whose
        gradients are computed at :math:`z_i`.
    outer : callable, optional
        Makes :math:`z_i` from :math:`a_i` in place of the outer rate, as for :class:`DiLoCo`, with the gradient
        :math:`a_i - x_i`; leave ``outer_lr`` out with it.

    References
    ----------
    Cagnasso, Belilovsky and Oyallon, 2026, arXiv 2606.11081, with :math:`W = I - \alpha \Lambda`.
    """

    keeps: Mapping[str, Kept] = {_BEFORE: Kept("mean", "own")}
    _constants = ("period", "outer_lr", "outer_momentum")

    def __init__(
        self,
        period: int = 50,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.2,
        form: Form = "atc",
        outer: OuterFactory | None = None,
    ) -> None:
        super().__init__(period, form, outer_lr, outer_momentum)
        self._step_by(outer, OuterOptimizer(self.outer_lr), "own", outer_lr=outer_lr)

    def averaged(self, bucket: BucketView) -> None:
        super().averaged(bucket)
        bucket.kept[_BEFORE].copy_(bucket.values)

    def updated(self, bucket: BucketView) -> None:
        if self._ends_period(bucket.round_index):
            anchor = bucket.kept[ANCHOR]
            self._outer.step_(bucket, anchor - bucket.values)
            bucket.values.copy_(anchor)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        reached, before = bucket.kept[ANCHOR], bucket.kept[_BEFORE]
        reached.add_(bucket.values - reached.to(bucket.values.dtype))  # what was written to the values meanwhile
        moved = (reached - before).mul_(self.outer_momentum)
        before.copy_(reached)
        bucket.values.copy_(reached.add_(moved).add_(got[VALUES].difference))
