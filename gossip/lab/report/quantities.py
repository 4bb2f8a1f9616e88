"""What is measured in which units: how a value is written in a table, and where an axis has its ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossip.lab.report.report_document import Value

_MOST_TICKS = 6
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Unit:
    """A name with the space before it, and how much one is in the quantity's base unit."""

    suffix: str
    size: float


@dataclass(frozen=True)
class Quantity:
    """Something with units.

    Attributes
    ----------
    units
        From the smallest to the largest.
    log_ticks
        Where ticks may stand on a logarithmic axis, from the densest choice to the sparsest, given a range.
    decimals
        Of a mean, in its unit; None: four significant digits.
    """

    units: tuple[Unit, ...]
    log_ticks: Callable[[float, float], Sequence[Sequence[float]]]
    decimals: int | None = None

    def unit(self, value: float) -> Unit:
        """The largest unit of which the value has at least one; nothing stands in the base unit."""
        size = abs(value) * (1 + 1e-12) if value else 1.0
        return next((unit for unit in reversed(self.units) if unit.size <= size), self.units[0])

    def text(self, value: float) -> str:
        """A value with its unit."""
        return self._number(value, self.unit(value)) + self.unit(value).suffix

    def value_text(self, value: Value) -> str:
        """A mean with its interval, or with its spread, where there is one, in one unit.

        It has as many decimals as the quantity says, or else the spread tells.
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
        exponent = math.floor(math.log10(max(abs(mean), spread)))
        if -4 < exponent < 6:
            return f"{_with_spread(mean, spread)}{unit.suffix}"
        scaled = _with_spread(mean / 10.0**exponent, spread / 10.0**exponent)
        return f"({scaled})·{_power_of_ten(exponent)}{unit.suffix}"

    def tick_text(self, value: float) -> str:
        """A value where a tick is: round numbers."""
        unit = self.unit(value)
        return _significant(value / unit.size, 4) + unit.suffix

    def _number(self, value: float, unit: Unit) -> str:
        if self.decimals is not None:
            return f"{value / unit.size:.{self.decimals}f}"
        return _significant(value / unit.size, 4)


def _significant(number: float, digits: int) -> str:
    """Significant digits, as people write them: 0.0013, 52000, 2·10⁻⁵."""
    if number and not 1e-3 <= abs(number) < 1e6:
        mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        power = _power_of_ten(int(exponent))
        return power if mantissa == "1" else f"{mantissa}·{power}"
    if abs(number) >= 10**digits:
        return f"{number:.0f}"
    return f"{number:.{digits}g}"


def _with_spread(mean: float, spread: float) -> str:
    """One digit of the spread, two if the first is a 1; of the mean as many decimals, at most four."""
    mantissa, exponent = f"{spread:.1e}".split("e")
    decimals = min(max(mantissa.startswith("1") - int(exponent), 0), 4)
    return f"{mean:.{decimals}f} ± {spread:.{decimals}f}"


def _power_of_ten(exponent: int) -> str:
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def _decimal_ticks(low: float, high: float) -> list[list[float]]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    dense = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    return [dense, *([10.0**e for e in exponents if e % stride == 0] for stride in (1, 2, 3, 5, 10))]


def _binary_ticks(low: float, high: float) -> list[list[float]]:
    exponents = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    return [[2.0**e for e in exponents if e % stride == 0] for stride in (1, 2, 5, 10)]


def _time_ticks(low: float, high: float) -> list[list[float]]:
    """Below a minute decimal, above it such as clocks have."""
    clock = [60.0 * minutes for minutes in (1, 2, 5, 10, 20, 30)] + [3600.0 * hours for hours in (1, 2, 5, 10)]
    days = [86400.0 * many for exponent in range(6) for many in (10**exponent, 3 * 10**exponent)]
    dense, decades, *sparse = _decimal_ticks(low, min(high, 60.0)) if low < 60.0 else [[], []]
    below = [tick for tick in dense if tick < 60.0]
    tens = [tick for tick in decades if tick < 60.0]
    return [
        below + clock + days,
        [*tens, 60.0, 600.0, 3600.0, 36000.0, *days[::2]],
        [*(tick for tick in (sparse[1] if sparse else []) if tick < 60.0), 60.0, 3600.0, 86400.0],
    ]


FRACTION = Quantity((Unit(" %", 0.01),), _decimal_ticks, decimals=2)
BYTES = Quantity(
    (Unit(" B", 1.0), Unit(" KiB", 2.0**10), Unit(" MiB", 2.0**20), Unit(" GiB", 2.0**30), Unit(" TiB", 2.0**40)),
    _binary_ticks,
)
SECONDS = Quantity(
    (
        Unit(" µs", 1e-6), Unit(" ms", 1e-3), Unit(" s", 1.0), Unit(" min", 60.0), Unit(" h", 3600.0),
        Unit(" d", 86400.0),
    ),
    _time_ticks,
)  # fmt: skip
NUMBER = Quantity((Unit("", 1.0),), _decimal_ticks)
POINTS = Quantity((Unit("", 1.0),), _decimal_ticks, decimals=2)
RATIO = Quantity((Unit("", 1.0),), _decimal_ticks, decimals=3)


def linear_ticks(quantity: Quantity, low: float, high: float) -> list[float]:
    """Round values in one unit between two limits."""
    unit = quantity.unit(max(abs(low), abs(high))).size
    span = (high - low) / unit
    power = 10.0 ** math.floor(math.log10(span / _MOST_TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= _MOST_TICKS)
    first, last = math.ceil(low / unit / step - 1e-9), math.floor(high / unit / step + 1e-9)
    return [round(index * step, 12) * unit for index in range(first, last + 1)]


def log_ticks(quantity: Quantity, low: float, high: float) -> list[float]:
    """The densest choice that is not too dense."""
    choices = [
        [tick for tick in choice if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        for choice in quantity.log_ticks(low, high)
    ]
    return next((choice for choice in choices if len(choice) <= _MOST_TICKS), choices[-1])
