"""The order of a step, the same for a bucket on one rank and for all buckets of all virtual workers."""

from collections.abc import Callable, Sequence
from typing import Generic

import torch

from gossip.algorithms import BucketView
from gossip.exchange.exchanges import AnyInFlight, AnyMeter, Exchanges

SkippedRows = Callable[[int], Sequence[torch.Tensor]]


class StepOrder(Generic[AnyInFlight, AnyMeter]):
    """The order of a step: combine what arrived, remember, direct, update, send.

    A step calls :meth:`begin`, then the optimizers, right before them :meth:`direct` if there are gradients that are
    complete, clipped and finite, and then :meth:`end`; for one bucket or for several together.
    """

    def __init__(self, exchanges: Exchanges[AnyInFlight, AnyMeter]) -> None:
        self._exchanges = exchanges
        self._algorithm = exchanges.algorithm

    def begin(self, indices: Sequence[int], step: int, meter: AnyMeter) -> None:
        """Combine what has arrived for these buckets, and remember their values."""
        for index in indices:
            in_flight = self._exchanges.in_flight[index]
            if in_flight is not None and step >= in_flight.round_index + self._algorithm.overlap:
                self._exchanges.combine_(index, meter)
            if self._algorithm.remembers_before:
                for view in self._exchanges.views(index):
                    view.before = view.values.clone()

    def direct(self, indices: Sequence[int], step: int, skipped: SkippedRows | None = None) -> None:
        """Let the algorithm replace the gradients of the buckets that have any.

        Of virtual workers ``skipped`` returns which rows of each view of a bucket, [k] bool, are not to be updated.
        """
        if self._algorithm.directs:
            for index in indices:
                if self._exchanges.holds_parameters(index):
                    views = self._exchanges.views(index)
                    for view, rows in zip(views, skipped(index) if skipped else [None] * len(views), strict=True):
                        self._direct(view, rows, step)

    def _direct(self, view: BucketView, skipped: torch.Tensor | None, step: int) -> None:
        if all(parameter.grad is None for parameter in view.parameters) or (
            skipped is not None and bool(skipped.all())
        ):
            return
        gradient = view.gradient()
        kept, view.skipped = {}, skipped
        if skipped is not None and bool(skipped.any()):
            kept = {name: state[skipped].clone() for name, state in view.kept.items()}
            gradient[skipped] = 0  # it need not be finite
        view.round_index = step
        view.set_gradient(self._algorithm.gradient(view, gradient))
        view.skipped = None
        for name, rows in kept.items():
            view.kept[name][skipped] = rows

    def end(self, indices: Sequence[int], step: int, meter: AnyMeter) -> None:
        """Notify the algorithm of the update, and send."""
        for index in indices:
            if self._exchanges.holds_parameters(index):
                exchanges = self._exchanges.is_due(index, step)
                for view in self._exchanges.views(index):
                    view.round_index, view.exchanges = step, exchanges
                    if self._algorithm.follows_learning_rate:
                        view.follow_learning_rate()
                    self._algorithm.updated(view)
                    view.before = view.values
            self._exchanges.send(index, step, meter)
