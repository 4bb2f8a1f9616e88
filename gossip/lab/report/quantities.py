"""Quantities with their units, the formatting of values, and the scales of axes."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from gossip.lab.report.report_document import Value

_FAR = 1e3
"""How many times the median, or which part of it, is far from the compared values. A part as small is of rounding."""
_STRIP = 0.12
"""The height of the strip below the break of an axis, in that of the axis."""


class Unit(NamedTuple):
    """A unit: its suffix, including the leading space, and its size in the base unit of the quantity."""

    suffix: str
    size: float


class Quantity(NamedTuple):
    """A quantity with its units, from the smallest to the largest.

    Its means have this number of decimals, or four significant digits. ``best`` is the value that none exceeds.
    """

    units: tuple[Unit, ...]
    decimals: int | None = None
    best: float | None = None

    def unit(self, value: float) -> Unit:
        """Return the largest unit in which the value is at least 1; zero is given in the base unit."""
        size = abs(value) * (1 + 1e-12) if value else 1.0
        return next((unit for unit in reversed(self.units) if unit.size <= size), self.units[0])

    def text(self, value: float) -> str:
        """Format a value with its unit."""
        return self._number(value, self.unit(value)) + self.unit(value).suffix

    def value_text(self, value: Value) -> str:
        """Format a mean with its interval or else its spread, if there is one, in a common unit.

        The number of decimals is that of the quantity, or else follows from the spread.
        """
        unit = self.unit(value.mean)
        if value.interval is not None:
            low, high = (self._number(end, unit) for end in value.interval)
            return f"{self._number(value.mean, unit)} ({low} to {high}){unit.suffix}"
        if value.spread is None or (value.spread == 0 and self.decimals is None):
            return self._number(value.mean, unit) + unit.suffix
        mean, spread = value.mean / unit.size, value.spread / unit.size
        if self.decimals is not None:
            return f"{mean:.{self.decimals}f} ± {spread:.{self.decimals}f}{unit.suffix}"
        if not 1e-3 <= max(abs(mean), spread) < 1e6:
            return f"{mean:.3g} ± {spread:.1g}{unit.suffix}"
        # One significant digit of the spread, two if the first is a 1; at most four decimals.
        mantissa, exponent = f"{spread:.1e}".split("e")
        decimals = min(max(mantissa.startswith("1") - int(exponent), 0), 4)
        return f"{mean:.{decimals}f} ± {spread:.{decimals}f}{unit.suffix}"

    def _number(self, value: float, unit: Unit) -> str:
        if self.decimals is not None:
            return f"{value / unit.size:.{self.decimals}f}"
        number = value / unit.size  # with four significant digits: 0.0013, 52000, 2e-05
        return f"{number:.0f}" if 1e4 <= abs(number) < 1e6 else f"{number:.4g}"


FRACTION = Quantity((Unit(" %", 0.01),), decimals=2, best=1.0)
BYTES = Quantity(tuple(Unit(f" {prefix}B", 1024.0**power) for power, prefix in enumerate(("", "Ki", "Mi", "Gi", "Ti"))))
SECONDS = Quantity((
    Unit(" µs", 1e-6), Unit(" ms", 1e-3), Unit(" s", 1.0), Unit(" min", 60.0), Unit(" h", 3600.0), Unit(" d", 86400.0),
))  # fmt: skip
NUMBER = Quantity((Unit("", 1.0),))
POINTS = Quantity((Unit("", 1.0),), decimals=2)
RATIO = Quantity((Unit("", 1.0),), decimals=3)


class Scale(NamedTuple):
    """The scale of an axis, from ``low`` to ``high``; ends beyond it are drawn at its edge.

    On a logarithmic axis the range is one of distances from the best value, if the quantity has one: accuracy is drawn
    by the share of errors, which decreases upwards. If ends lie below what it can tell apart, such as zero, it is
    broken at ``break_at``: they are drawn in the middle of the strip between ``low`` and the break.
    """

    quantity: Quantity
    low: float
    high: float
    is_log: bool
    break_at: float | None = None

    @classmethod
    def over(
        cls,
        compared: Sequence[float],
        always: Sequence[float],
        quantity: Quantity,
        *,
        may_be_log: bool,
        ends: Sequence[float] = (),
    ) -> Scale:
        """Return a scale that covers the values, of which there must be at least one, with a small margin.

        It is logarithmic if this is permitted and the positive values span more than a decade. Compared values that are
        more than a thousand times their median may lie beyond it. On a logarithmic axis, so do all that are less than a
        thousandth, unless they are ends, for which it is broken.
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
                if any(distance(value) < low for value in ends):
                    strip = max(low / (high / low) ** _STRIP, sys.float_info.min)
                    return cls(quantity, strip, high, is_log=True, break_at=low)
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
        distance = self.distance(value)
        if self.break_at is not None and distance < self.break_at:
            return self.strip / self.unit.size
        return min(max(distance, self.low), self.high) / self.unit.size

    @property
    def strip(self) -> float:
        """The middle of the strip beyond the break."""
        return self.low if self.break_at is None else math.sqrt(self.low) * math.sqrt(self.break_at)

    def reaches(self, value: float) -> bool:
        """Whether a value lies within the axis, or in its strip."""
        distance = self.distance(value)
        return distance <= self.high and (self.break_at is not None or self.low <= distance)

    @property
    def unit(self) -> Unit:
        """The unit in which the axis is labelled."""
        return self.quantity.unit(max(abs(self.low), abs(self.high)))
