"""Quantities with their units, and the formatting of values."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.lab.report.report_document import Value


@dataclass(frozen=True)
class Unit:
    """A unit: its suffix, including the leading space, and its size in the base unit of the quantity."""

    suffix: str
    size: float


@dataclass(frozen=True)
class Quantity:
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
        return _significant(value / unit.size)


def _significant(number: float) -> str:
    """Format a number with four significant digits: 0.0013, 52000, 2e-05."""
    return f"{number:.0f}" if 1e4 <= abs(number) < 1e6 else f"{number:.4g}"


FRACTION = Quantity((Unit(" %", 0.01),), decimals=2, best=1.0)
BYTES = Quantity(
    tuple(Unit(f" {prefix}B", 2.0 ** (10 * power)) for power, prefix in enumerate(("", "Ki", "Mi", "Gi", "Ti")))
)
SECONDS = Quantity(
    (
        Unit(" µs", 1e-6), Unit(" ms", 1e-3), Unit(" s", 1.0), Unit(" min", 60.0), Unit(" h", 3600.0),
        Unit(" d", 86400.0),
    ),
)  # fmt: skip
NUMBER = Quantity((Unit("", 1.0),))
POINTS = Quantity((Unit("", 1.0),), decimals=2)
RATIO = Quantity((Unit("", 1.0),), decimals=3)
