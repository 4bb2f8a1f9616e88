"""Loss against seconds and bytes, and when a curve reaches its target."""

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
        Steps made before it.
    seconds : float
        Of training until then, evaluations not counted.
    sent_bytes : float
        Of training until then, per rank, as the interface counts them.
    loss : float
        On held-out data.
    """

    step: int
    seconds: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True)
class Curve:
    """One method's training from one seed."""

    method: str
    seed: int
    points: Sequence[Point]

    def reached(self, target: float) -> Point | None:
        """The first evaluation with at most this loss; None: it never was."""
        return next((point for point in self.points if point.loss <= target), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def reaches_or_ends(target: float, limit_s: float) -> Callable[[Point], bool]:
    """Whether a training is done: it has reached the target, or had its time."""
    return lambda point: point.loss <= target or point.seconds >= limit_s


def target_of(reference: Sequence[Point]) -> float:
    """The loss at the end of all-reduce's training plus 1 %."""
    return (1 + TOLERANCE) * reference[-1].loss
