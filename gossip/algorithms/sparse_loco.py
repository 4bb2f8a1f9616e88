"""SparseLoCo: DiLoCo with messages of few values in few bits, and feedback of what they leave out."""

from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Form, Kept, Requires
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.outer_steps import ANCHOR, OuterSteps
from gossip.compression.sparse_quantization import SparseQuantization
from topologies.validation import check_real

ERROR = "error"


class SparseLoCo(OuterSteps):
    r"""Local steps, then an exchange of the largest quantized values of each rank's movement, with error feedback.

    All ranks start from the anchor :math:`a` and make H steps with their own optimizers, which end at :math:`x_i`. With
    C the largest values of each block on a coarse grid, the outer rate :math:`\alpha` and the decay :math:`\beta`:

    .. math::
        m_i = C\bigl(\beta\, e_i + a - x_i\bigr), \qquad e_i \leftarrow \beta\, e_i + a - x_i - m_i, \qquad
        a \leftarrow a - \frac{\alpha}{n} \sum_j m_j, \qquad x_i \leftarrow a

    The error :math:`e_i` replaces an outer momentum.

    In every H-th step it sends the share ``ratio`` of the values, each in 16 + ``bits`` bits, and it keeps two tensors
    per bucket. Every round must be the exact average, so the topology must be complete. It encodes its messages itself
    and cannot be combined with a compression. Use it where links are too slow for DiLoCo.

    Parameters
    ----------
    period : int
        H, the number of steps from one exchange to the next, at least 1.
    ratio : float
        The share of a bucket's values that is sent, the gaps between its parameters included; above 0 and at most 1.
    bits : int
        The bits per value, 2, 4 or 8.
    decay : float
        :math:`\beta`, at least 0 and below 1.
    outer_lr : float
        The outer rate, above 0.
    form : str
        "atc": the messages are awaited before the next forward pass; "awc": they have the whole next iteration.

    References
    ----------
    Sarfi, Thérien, Lidin and Belilovsky, "Communication efficient LLM pre-training with SparseLoCo", 2025, algorithm 1.
    """

    unclipped_because = "needs averages that are exact"
    requires = Requires(exact=True)
    keeps: Mapping[str, Kept] = {ANCHOR: Kept("mean", "common"), ERROR: Kept("mean", "own")}
    reads_sent = True

    def __init__(
        self,
        period: int = 50,
        ratio: float = 1 / 64,
        bits: int = 2,
        decay: float = 0.95,
        outer_lr: float = 1.0,
        form: Form = "atc",
    ) -> None:
        super().__init__(period, form, outer_lr)
        self.decay = check_real("decay", decay, "at least 0 and below 1", example=0.9)
        self.compression: SparseQuantization = SparseQuantization(ratio, bits)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        anchor, error = bucket.kept[ANCHOR], bucket.kept[ERROR]
        difference, sent = got[VALUES]
        assert sent is not None
        error.copy_(self.message(bucket)[VALUES]).sub_(sent)
        anchor.sub_(difference + sent, alpha=self.outer_lr)
        bucket.values.copy_(anchor)

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        return {VALUES: bucket.kept[ANCHOR] - bucket.values + self.decay * bucket.kept[ERROR]}

    def describe(self) -> str:
        return (
            f"{type(self).__name__}({self.form}: period={self.period} {self.compression.describe()} "
            f"decay={self.decay:g} outer_lr={self.outer_lr:g})"
        )
