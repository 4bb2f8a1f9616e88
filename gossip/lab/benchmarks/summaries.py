"""Summaries of many values, and tables of them in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from pydantic import BaseModel


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


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown: texts to the left in the first column, numbers to the right in all others."""
    header = [f"| {' | '.join(titles)} |", "| --- |" + " ---: |" * (len(titles) - 1)]
    return "\n".join([*header, *(f"| {' | '.join(row)} |" for row in rows)])
