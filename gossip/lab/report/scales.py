"""The range of an axis: the values that it must show, and the outliers that may lie beyond it."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gossip.lab.report.quantities import Quantity, Unit

_FENCE = 3.0
"""The outlier fence in interquartile ranges: what Tukey (Exploratory Data Analysis, 1977, 2D) calls far out."""
_FEWEST = 4
"""With fewer numbers, quartiles are not meaningful, and none of the numbers counts as an outlier."""


@dataclass(frozen=True)
class Scale:
    """The scale of an axis. Values outside its range, or not positive on a logarithmic axis, have no place on it."""

    quantity: Quantity
    low: float
    high: float
    is_log: bool

    @classmethod
    def over(cls, values: Sequence[float], quantity: Quantity, *, may_be_log: bool) -> Scale:
        """Return a scale that covers the values, of which there must be at least one, with a small margin.

        It is logarithmic if this is permitted and the positive values span more than a decade.
        """
        positive = [value for value in values if value > 0]
        if may_be_log and positive and max(positive) > 10 * min(positive):
            room = (max(positive) / min(positive)) ** 0.03
            low, high = max(min(positive) / room, sys.float_info.min), min(max(positive) * room, sys.float_info.max)
            return cls(quantity, low, high, is_log=True)
        low, high = min(values), max(values)
        room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
        # The axis of values that are never negative does not extend below zero.
        return cls(quantity, max(low - room, 0.0) if low >= 0 else low - room, high + room, is_log=False)

    @classmethod
    def without_outliers(
        cls,
        compared: Sequence[float],
        others: Iterable[Sequence[float]],
        quantity: Quantity,
        *,
        may_be_log: bool,
        target: float | None = None,
    ) -> Scale:
        """Return a scale that covers the target and the compared values without their outliers.

        Outliers lie more than three interquartile ranges beyond the quartiles, computed on logarithms if the axis would
        be logarithmic. Each group of other values, such as a baseline's or the ends of a spread, is included if it
        extends neither end by more than the length of the axis.
        """
        required = [] if target is None else [target]
        is_log = cls.over([*required, *compared], quantity, may_be_log=may_be_log).is_log
        core = [*required, *_within_fences(compared, is_log=is_log)]
        scale = cls.over(core, quantity, may_be_log=may_be_log)
        for group in others:
            shares = [share for value in group if (share := scale.share(value)) is not None]
            if shares and min(shares) >= -1.0 and max(shares) <= 2.0:
                core += group
        return cls.over(core, quantity, may_be_log=may_be_log)

    def share(self, value: float) -> float | None:
        """Return the relative position of a value: 0 to 1 within the axis; None if it has no place on a log axis."""
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        if value <= 0:
            return None
        return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def reaches(self, value: float) -> bool:
        """Whether a value lies within the axis."""
        share = self.share(value)
        return share is not None and 0.0 <= share <= 1.0

    @property
    def unit(self) -> Unit:
        """The unit in which the axis is labelled."""
        return self.quantity.unit(max(abs(self.low), abs(self.high)))


def _within_fences(numbers: Sequence[float], *, is_log: bool) -> list[float]:
    """Return the numbers that are not outliers, at least half of those considered; non-positive ones have no log."""
    places = [(math.log(number) if is_log else number, number) for number in numbers if number > 0 or not is_log]
    if len(places) < _FEWEST:
        return list(numbers)
    lower, _, upper = statistics.quantiles([place for place, _ in places], method="inclusive")
    reach = _FENCE * (upper - lower) + 1e-9 * max(abs(lower), abs(upper))
    return [number for place, number in places if lower - reach <= place <= upper + reach]
