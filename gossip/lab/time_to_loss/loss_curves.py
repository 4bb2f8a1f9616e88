"""Curves of loss against seconds and bytes, and the point at which a curve reaches its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TOLERANCE = 0.01


@dataclass(frozen=True)
class Point:
    """One evaluation of the averaged model.

    Attributes
    ----------
    step : int
        The number of steps made before the evaluation.
    seconds : float
        The training time until then, without evaluations.
    sent_bytes : float
        The bytes sent per rank in training until then, as counted by the network interface.
    loss : float
        The loss on held-out data.
    """

    step: int
    seconds: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True)
class Curve:
    """The evaluations of one method's training from one seed."""

    method: str
    seed: int
    points: Sequence[Point]

    def reached(self, target: float) -> Point | None:
        """Return the first evaluation with at most this loss, or None if there is none."""
        return next((point for point in self.points if point.loss <= target), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the curve as plain JSON types."""
        return asdict(self)


def reaches_or_ends(target: float, limit_s: float) -> Callable[[Point], bool]:
    """Return a function that tells whether a training has reached the target or used up its time."""
    return lambda point: point.loss <= target or point.seconds >= limit_s


def target_of(reference: Sequence[Point]) -> float:
    """Return the target: the loss at the end of all-reduce's training plus 1 %."""
    return (1 + TOLERANCE) * reference[-1].loss
