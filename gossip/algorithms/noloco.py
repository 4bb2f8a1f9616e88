"""NoLoCo: many local steps between outer steps, each of which involves only the partners of one round."""

from collections.abc import Mapping

from gossip.algorithms.base import VALUES, Form, Kept
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.outer_steps import ANCHOR, VELOCITY, OuterSteps
from topologies.validation import check_real


class NoLoCo(OuterSteps):
    r"""DiLoCo without an all-reduce: an outer step involves only a rank's partners, and pulls their anchors together.

    A rank starts from its own anchor :math:`a_i` and makes H steps with its own optimizer, which end at :math:`x_i`.
    Then, with the outer rate :math:`\beta`, the outer momentum :math:`\alpha` and the pull :math:`\gamma`:

    .. math::
        v_i \leftarrow \alpha\, v_i + \beta \sum_j W_{ij} (x_j - a_j) - \gamma \bigl(a_i - \sum_j W_{ij} a_j\bigr),
        \qquad a_i \leftarrow a_i + v_i, \qquad x_i \leftarrow a_i

    A rank without a partner makes the step alone. Outer step s uses round s of the topology. The paper uses pairs drawn
    at random ("random_matching"), for which the spread of the anchors stays bounded if :math:`\alpha < \gamma < \sqrt{2
    + \alpha^2}`.

    Sends two messages every H steps, values and anchors, and keeps two tensors per bucket. Works with any doubly
    stochastic W. Use it where links are slow and ranks are many, or where no collective over all of them is reliable.

    Parameters
    ----------
    period : int
        H, the number of steps from one outer step to the next, at least 1.
    outer_lr, pull : float
        The outer rate and the pull, each above 0.
    outer_momentum : float
        The outer momentum, at least 0 and below 1.
    form : str
        "atc": the messages are awaited before the next forward pass; "awc": they have the whole next iteration.

    References
    ----------
    Kolehmainen, Blagoev, Donaghy, Ersoy and Nies, "NoLoCo: No-all-reduce low communication training method for large
    models", 2025, equations (1) to (3).
    """

    sends = (VALUES, ANCHOR)
    keeps: Mapping[str, Kept] = {ANCHOR: Kept("mean", "own"), VELOCITY: Kept("mean", "own")}
    _constants = ("period", "outer_lr", "outer_momentum", "pull")

    def __init__(
        self,
        period: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        pull: float = 1.0,
        form: Form = "atc",
    ) -> None:
        super().__init__(period, form, outer_lr, outer_momentum)
        self.pull = check_real("pull", pull, "above 0 and finite", example=1.0)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        anchor, velocity = bucket.kept[ANCHOR], bucket.kept[VELOCITY]
        pull = got[ANCHOR].difference
        moved = (bucket.values + got[VALUES].difference).sub_(anchor).sub_(pull)
        velocity.mul_(self.outer_momentum).add_(moved, alpha=self.outer_lr).add_(pull, alpha=self.pull)
        anchor.add_(velocity)
        bucket.values.copy_(anchor)
