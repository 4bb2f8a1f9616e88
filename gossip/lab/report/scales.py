"""The range of an axis: what it must show, and what may lie beyond it."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gossip.lab.report.quantities import Quantity, Unit

_FENCE = 3.0
"""In distances between the quartiles: what Tukey (Exploratory Data Analysis, 1977, 2D) calls far out."""
_FEWEST = 4
"""Fewer numbers have no quartiles that mean anything, and none of them is an outlier."""


@dataclass(frozen=True)
class Extent:
    """What an axis would have to show of one row.

    Attributes
    ----------
    end
        Where the row ends.
    values
        Along its curve.
    is_compared
        Whether the row is one of those for which the axis is made; baselines are not.
    whiskers
        The ends of its spread.
    """

    end: float
    values: tuple[float, ...]
    is_compared: bool
    whiskers: tuple[float, ...] = ()


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
            room = math.exp(0.03 * (math.log(max(positive)) - math.log(min(positive))))
            low, high = max(min(positive) / room, sys.float_info.min), min(max(positive) * room, sys.float_info.max)
            return cls(quantity, low, high, is_log=True)
        low, high = min(known), max(known)
        room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
        # What cannot be negative has no axis below zero.
        return cls(quantity, max(low - room, 0.0) if low >= 0 else low - room, high + room, is_log=False)

    @classmethod
    def without_outliers(
        cls, extents: Sequence[Extent], quantity: Quantity, *, may_be_log: bool, others: Sequence[float] = ()
    ) -> Scale:
        """A scale that no odd row, odd point of a curve or wide spread can squeeze.

        Outliers lie more than three distances between the quartiles beyond the quartiles, of the logarithms where the
        axis would be logarithmic. The scale is made for the compared rows (all, where none is) whose ends are no
        outliers among the ends, and for the points of their curves that are none among the points. Whatever else there
        is, the other rows and all spreads, is taken in where it carries neither end farther than the axis was long.

        Parameters
        ----------
        extents
            Of the rows, at least one.
        others
            What must be seen beside the rows.
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

    def widened(self, values: Iterable[float]) -> Scale:
        """The scale that reaches these values too, outliers or not."""
        return Scale.over([self.low, self.high, *values], self.quantity, may_be_log=self.is_log)

    def share(self, value: float) -> float | None:
        """How far along the axis a value is: 0 to 1 within it."""
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        if value <= 0:
            return None
        return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def reaches(self, value: float) -> bool:
        """Whether a value has its place within the axis."""
        share = self.share(value)
        return share is not None and 0.0 <= share <= 1.0

    @property
    def unit(self) -> Unit:
        """In which the axis is labelled."""
        return self.quantity.unit(max(abs(self.low), abs(self.high)))

    def _is_near(self, values: Sequence[float]) -> bool:
        shares = [share for value in values if (share := self.share(value)) is not None]
        return bool(shares) and min(shares) >= -1.0 and max(shares) <= 2.0


def _points(extents: Iterable[Extent]) -> list[float]:
    return [value for extent in extents for value in (extent.end, *extent.values)]


def _within_fences(numbers: Sequence[float], *, is_log: bool) -> list[float]:
    """Those that are no outliers: half of them at least. What is not positive has no logarithm."""
    places = [(math.log(number) if is_log else number, number) for number in numbers if number > 0 or not is_log]
    if len(places) < _FEWEST:
        return list(numbers)
    lower, _, upper = statistics.quantiles([place for place, _ in places], method="inclusive")
    reach = _FENCE * (upper - lower) + 1e-9 * max(abs(lower), abs(upper))
    return [number for place, number in places if lower - reach <= place <= upper + reach]
