"""From values to places along an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gossip.lab.report.quantities import Quantity, linear_ticks, log_ticks


@dataclass(frozen=True)
class Scale:
    """An axis. What lies outside of it, or is not positive on a logarithmic one, has no place.

    Attributes
    ----------
    quantity
        What is along it.
    low, high
        The values at its ends.
    is_log
        Whether equal ratios have equal lengths.
    """

    quantity: Quantity
    low: float
    high: float
    is_log: bool

    @classmethod
    def over(cls, values: Iterable[float], quantity: Quantity, *, may_be_log: bool) -> Scale:
        """A scale on which the values, at least one, have their place, with a little room.

        It is logarithmic if it may be and the positive values span more than a decade.
        """
        known = list(values)
        positive = [value for value in known if value > 0]
        if may_be_log and positive and max(positive) > 10 * min(positive):
            room = (max(positive) / min(positive)) ** 0.03
            return cls(quantity, min(positive) / room, max(positive) * room, is_log=True)
        low, high = min(known), max(known)
        room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
        # What cannot be negative has no axis below zero.
        return cls(quantity, max(low - room, 0.0) if low >= 0 else low - room, high + room, is_log=False)

    def share(self, value: float) -> float | None:
        """How far along the axis a value is: 0 to 1 within it."""
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else None

    def reaches(self, value: float) -> bool:
        """Whether a value has its place within the axis."""
        share = self.share(value)
        return share is not None and 0.0 <= share <= 1.0

    @property
    def ticks(self) -> list[float]:
        find = log_ticks if self.is_log else linear_ticks
        return find(self.quantity, self.low, self.high)
