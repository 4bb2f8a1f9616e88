"""The range of an axis: the values that it must show, and the outliers that may lie beyond it."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gossip.lab.report.quantities import Quantity, Unit

_FAR = 1e3
"""How many times the median, or which part of it, is far from the compared values. A part as small is of rounding."""


@dataclass(frozen=True)
class Scale:
    """The scale of an axis, from ``low`` to ``high``; ends beyond it are drawn at its edge.

    On a logarithmic axis the range is one of distances from the best value, if the quantity has one: accuracy is drawn
    by the share of errors, which decreases upwards.
    """

    quantity: Quantity
    low: float
    high: float
    is_log: bool

    @classmethod
    def over(cls, compared: Sequence[float], always: Sequence[float], quantity: Quantity, *, may_be_log: bool) -> Scale:
        """Return a scale that covers the values, of which there must be at least one, with a small margin.

        It is logarithmic if this is permitted and the positive values span more than a decade. Compared values that are
        more than a thousand times their median may lie beyond it, and on a logarithmic axis all that are less than a
        thousandth.
        """
        if may_be_log:
            distance = cls(quantity, 0.0, 0.0, is_log=True).distance
            positive = [far for value in compared or always if (far := distance(value)) > 0]
            middle = statistics.median(positive) if positive else 1.0
            compared = [value for value in compared if distance(value) <= _FAR * middle]
            shown = [far for value in (*compared, *always) if (far := distance(value)) > middle / _FAR]
            if shown and max(shown) > 10 * min(shown):
                room = (max(shown) / min(shown)) ** 0.03
                low, high = max(min(shown) / room, sys.float_info.min), min(max(shown) * room, sys.float_info.max)
                return cls(quantity, low, high, is_log=True)
        low, high = min((*compared, *always)), max((*compared, *always))
        room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
        # The axis of values that are never negative does not extend below zero.
        return cls(quantity, max(low - room, 0.0) if low >= 0 else low - room, high + room, is_log=False)

    @property
    def is_from_best(self) -> bool:
        """Whether the axis shows distances from the best value of the quantity."""
        return self.is_log and self.quantity.best is not None

    def distance(self, value: float) -> float:
        """Return the number that the axis shows of a value."""
        return self.quantity.best - value if self.is_log and self.quantity.best is not None else value

    def place(self, value: float) -> float:
        """Return where a value is drawn, in the unit of the axis: at the edge if it lies beyond."""
        return min(max(self.distance(value), self.low), self.high) / self.unit.size

    def reaches(self, value: float) -> bool:
        """Whether a value lies within the axis."""
        return self.low <= self.distance(value) <= self.high

    @property
    def unit(self) -> Unit:
        """The unit in which the axis is labelled."""
        return self.quantity.unit(max(abs(self.low), abs(self.high)))
