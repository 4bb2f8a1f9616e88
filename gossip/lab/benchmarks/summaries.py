"""Summaries of many values, tables of them in Markdown, and the look of figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from gossip.lab.experiments.run_figures import BLUE, GREEN, ORANGE

_COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", ":")


class Spread(BaseModel):
    """A median with a range: quartiles over steps and ranks, or the lowest and highest value over repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def quartiles(cls, values: Sequence[float]) -> Spread:
        """Return the median and the quartiles of many values."""
        if len(values) == 1:
            return cls.over(values)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        """Return the median, the lowest and the highest value, for example over repetitions."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def shown(self, form: str, factor: float = 1.0) -> str:
        """Return the median, and the range if there is one."""
        median, low, high = (format(factor * value, form) for value in (self.median, self.low, self.high))
        return median if low == high else f"{median} ({low} to {high})"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown: texts to the left in the first column, numbers to the right in all others."""
    header = [f"| {' | '.join(titles)} |", "| --- |" + " ---: |" * (len(titles) - 1)]
    return "\n".join([*header, *(f"| {' | '.join(row)} |" for row in rows)])


def look(number: int) -> dict[str, Any]:
    """Return colour and line style of the method with this number."""
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _LINES[number // len(_COLOURS) % len(_LINES)]}
