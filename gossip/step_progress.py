"""How far a step has come."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from gossip.mixing import AnyBucket
from gossip.stats import Meter


class StepProgress:
    """Of the step that is being made; the next one gets another."""

    def __init__(self, buckets: Sequence[AnyBucket]) -> None:
        self.awaited_gradients = [set(bucket.places) for bucket in buckets]
        self.num_launched = 0  # buckets launch in index order, the same on every rank
        self.callback_is_queued = False  # at the end of the backward pass
        self.has_gradients = False
        self.has_begun = False
        self.stepped: list[Optimizer] = []  # by their owner, in this step
        self.meter = Meter()
