"""The progress of a step."""

import threading
from collections.abc import Sequence

from torch.optim import Optimizer

from gossip.exchange.rank_exchanges import AnyBucket
from gossip.measuring.step_stats import Meter
from gossip.step.backward_pass import BackwardPass


class StepProgress:
    """The progress of the current step; every step has its own."""

    def __init__(self, buckets: Sequence[AnyBucket]) -> None:
        self.awaited_gradients = [set(bucket.places) for bucket in buckets]
        self.num_launched = 0  # buckets are launched in index order, which is the same on every rank
        self.backward: BackwardPass | None = None  # the pass at whose end the step is made
        self.has_gradients = False
        self.is_unreduced = False  # the newest backward pass only accumulated
        self.was_reduced = False  # a backward pass has averaged gradients over the ranks that hold this replica
        self.is_counting = False  # there are gradients and no bucket is withheld
        self.has_begun = False
        self.stepped: list[Optimizer] = []  # stepped by the user in this step
        self.is_directed = False  # the algorithm has seen the gradients of optimizers that the user steps
        self.meter = Meter()
        self._withheld_by = 0  # a thread's identifier

    def count_gradients(self) -> None:
        """Note the first gradient; no bucket is withheld."""
        self.has_gradients = self.is_counting = True
        self._withheld_by = 0

    def withhold(self) -> None:
        """Note that a complete bucket must not be launched before the other hooks of this gradient have been called."""
        self.is_counting = False
        self._withheld_by = threading.get_ident()

    @property
    def may_release(self) -> bool:
        """Whether a withheld bucket's other hooks have been called, as this thread got another gradient."""
        return self._withheld_by == threading.get_ident()
