"""How far a step has come."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch.optim import Optimizer

from gossip.measuring.step_stats import Meter
from gossip.step.backward_pass import BackwardPass
from gossip.step.rank_exchanges import AnyBucket


class StepProgress:
    """Of the step that is being made; the next one gets another."""

    def __init__(self, buckets: Sequence[AnyBucket]) -> None:
        self.awaited_gradients = [set(bucket.places) for bucket in buckets]
        self.num_launched = 0  # buckets launch in index order, the same on every rank
        self.backward: BackwardPass | None = None  # the one at whose end the step is made
        self.has_gradients = False
        self.is_counting = False  # there are gradients, and no bucket is withheld
        self.has_begun = False
        self.stepped: list[Optimizer] = []  # by their owner, in this step
        self.is_directed = False  # the algorithm has seen the gradients of optimizers that are stepped by their owner
        self.meter = Meter()
        self._withheld_by = 0  # a thread

    def count_gradients(self) -> None:
        """The first one has come; no bucket is withheld."""
        self.has_gradients = self.is_counting = True
        self._withheld_by = 0

    def withhold(self) -> None:
        """A bucket is complete, but must not be launched before this gradient's other hooks have been called."""
        self.is_counting = False
        self._withheld_by = threading.get_ident()

    @property
    def may_release(self) -> bool:
        """Whether a bucket was withheld whose other hooks have been called, as the thread has got another gradient."""
        return self._withheld_by == threading.get_ident()
