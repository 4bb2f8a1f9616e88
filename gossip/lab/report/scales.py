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
class Extent:
    """The values of one row that an axis would have to show: its end, its curve, and the ends of its spread.

    The rows that are compared determine the axis; baselines are not.
    """

    end: float
    values: tuple[float, ...]
    is_compared: bool
    whiskers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scale:
    """The scale of an axis. Values outside its range, or not positive on a logarithmic axis, have no place on it."""

    quantity: Quantity
    low: float
    high: float
    is_log: bool

    @classmethod
    def over(cls, values: Iterable[float], quantity: Quantity, *, may_be_log: bool) -> Scale:
        """Return a scale that covers the values, of which there must be at least one, with a small margin.

        It is logarithmic if this is permitted and the positive values span more than a decade.
        """
        known = list(values)
        positive = [value for value in known if value > 0]
        if may_be_log and positive and max(positive) > 10 * min(positive):
            room = math.exp(0.03 * (math.log(max(positive)) - math.log(min(positive))))
            low, high = max(min(positive) / room, sys.float_info.min), min(max(positive) * room, sys.float_info.max)
            return cls(quantity, low, high, is_log=True)
        low, high = min(known), max(known)
        room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
        # The axis of values that are never negative does not extend below zero.
        return cls(quantity, max(low - room, 0.0) if low >= 0 else low - room, high + room, is_log=False)

    @classmethod
    def without_outliers(
        cls, extents: Sequence[Extent], quantity: Quantity, *, may_be_log: bool, others: Sequence[float] = ()
    ) -> Scale:
        """Return a scale that is robust to outlying rows, outlying points of curves and wide spreads.

        Outliers lie more than three interquartile ranges beyond the quartiles, computed on logarithms if the axis would
        be logarithmic. The scale covers the compared rows (all rows, if none is compared) whose ends are not outliers
        among the ends, and the points of their curves that are not outliers among the points. Everything else, which is
        the other rows and all spreads, is included if it extends neither end by more than the length of the axis. The
        ``others`` are further values that the axis must show.
        """
        compared = [extent for extent in extents if extent.is_compared] or list(extents)
        is_log = cls.over([*others, *_points(compared)], quantity, may_be_log=may_be_log).is_log
        ends = set(_within_fences([extent.end for extent in compared], is_log=is_log))
        inner = [extent for extent in compared if extent.end in ends]
        core = [*others, *ends, *_within_fences(_points(inner), is_log=is_log)]
        scale = cls.over(core, quantity, may_be_log=may_be_log)
        for extent in extents:
            rest = extent.whiskers if extent in inner else (extent.end, *extent.values, *extent.whiskers)
            if scale._is_near(rest):
                core += rest
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

    def _is_near(self, values: Sequence[float]) -> bool:
        shares = [share for value in values if (share := self.share(value)) is not None]
        return bool(shares) and min(shares) >= -1.0 and max(shares) <= 2.0


def _points(extents: Iterable[Extent]) -> list[float]:
    return [value for extent in extents for value in (extent.end, *extent.values)]


def _within_fences(numbers: Sequence[float], *, is_log: bool) -> list[float]:
    """Return the numbers that are not outliers, at least half of those considered; non-positive ones have no log."""
    places = [(math.log(number) if is_log else number, number) for number in numbers if number > 0 or not is_log]
    if len(places) < _FEWEST:
        return list(numbers)
    lower, _, upper = statistics.quantiles([place for place, _ in places], method="inclusive")
    reach = _FENCE * (upper - lower) + 1e-9 * max(abs(lower), abs(upper))
    return [number for place, number in places if lower - reach <= place <= upper + reach]
