"""The charts of the page, and the part of a row that each of them shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gossip.lab.report.quantities import BYTES, FRACTION, NUMBER, SECONDS, Quantity
from gossip.lab.report.report_document import Document, Metric, Row, Value
from gossip.lab.report.scales import Scale

#: The initial share of a run that does not count for the lower end of the accuracy axis: all runs start near chance.
_START = 0.5


class End(NamedTuple):
    """The end point of a row in a chart, with the spread of y; x and y also in words.

    A level stays at the start of the x-axis, because it sends nothing however long it runs.
    """

    x: float
    y: float
    spread: float | None
    is_level: bool
    width: str
    height: str

    def is_within(self, x: Scale, y: Scale) -> bool:
        """Whether it has a place within the axes; zero has none on a logarithmic one."""
        return y.reaches(self.y) and (self.is_level or x.reaches(self.x))

    def words(self, name: str) -> str:
        """Describe the end point of the row with this name."""
        return f"{name}: {self.height} at {self.width}"


@dataclass(frozen=True)
class Chart:
    """A chart of one of the :class:`Curves` against another, with the final result, ``y_value``, at the end.

    Without a ``y_value``, the end is the last point of the curve. The target is the level to be reached, if any.
    """

    identifier: str
    title: str
    x_title: str
    y_title: str
    x: Quantity
    y: Quantity
    x_curve: str
    y_curve: str
    y_value: str | None = None
    target: float | None = None
    higher_is_better: bool = False

    def end(self, row: Row) -> End | None:
        """Return the end point of a row; None if it is not known."""
        known = self._known(row)
        if not known:
            return None
        x, y = known[-1]
        value = row.values.get(self.y_value or "") or Value(mean=y, spread=None, count=1)
        width = f"{x:g} steps" if self.x_curve == "step" else self.x.text(x)
        height = self.y.value_text(value.model_copy(update={"interval": None}))
        return End(x, value.mean, value.spread, row.method == "local" and x == 0, width, height)

    def scales(self, rows: Sequence[Row]) -> tuple[Scale, Scale] | None:
        """Return the axes that all rows share; None if there is nothing to draw.

        See :meth:`Scale.without_outliers` for the values that may lie beyond them. The gossip rows determine the axes:
        replicas that never communicate may be useless, and with all-reduce the replicas differ by rounding alone.
        """
        ends = [(row, end) for row in rows if (end := self.end(row)) is not None]
        if not ends:
            return None
        up = [(row.method == "gossip", [end.y, *self._heights(row)]) for row, end in ends]
        spreads = [[end.y - end.spread, end.y + end.spread] for _, end in ends if end.spread]
        compared, others = _divided(up)
        y = Scale.without_outliers(
            compared, [*others, *spreads], self.y, may_be_log=self.y is not FRACTION, target=self.target
        )
        across = [
            (row.method == "gossip", [end.x, *(x for x, height in self._known(row) if height >= y.low)])
            for row, end in ends
            if y.reaches(end.y) and not end.is_level
        ]
        # If there are only levels, which span the whole x-axis, any range will do.
        compared, others = _divided(across or [(True, [0.0, 1.0])])
        return Scale.without_outliers(compared, others, self.x, may_be_log=self.x is not NUMBER), y

    def _known(self, row: Row) -> list[tuple[float, float]]:
        if row.curves is None:
            return []
        line = zip(getattr(row.curves, self.x_curve), getattr(row.curves, self.y_curve), strict=True)
        return [(x, y) for x, y in line if x is not None and y is not None]

    def _heights(self, row: Row) -> tuple[float, ...]:
        """Return the y-values of a curve that the axis should show; for accuracy, without the initial part."""
        line = self._known(row)
        return tuple(y for _, y in line[math.floor(_START * len(line)) if self.higher_is_better else 0 :])


def _divided(rows: Sequence[tuple[bool, list[float]]]) -> tuple[list[float], list[list[float]]]:
    """Return the values of the compared rows, or of all if none is compared, and those of each other row."""
    is_any = any(is_compared for is_compared, _ in rows)
    compared = [value for is_compared, values in rows if is_compared or not is_any for value in values]
    return compared, [values for is_compared, values in rows if is_any and not is_compared]


def charts(document: Document) -> list[Chart]:
    """The charts of a page, whether or not there is anything to draw in them."""
    metric, quantity = document.metric, quantity_of(document.metric)
    title, y_title = metric.name.capitalize(), f"{metric.name} of the averaged model"
    found = [
        Chart(
            identifier, f"{title} against {against}", x_title, y_title, x, quantity, curve, "metric",
            f"averaged_{metric.name}", metric.target, metric.higher_is_better,
        )
        for identifier, against, x_title, x, curve in (
            ("bytes", "bytes", "sent per rank", BYTES, "bytes"),
            ("time", "predicted time", "predicted time", SECONDS, "time_s"),
        )
    ]  # fmt: skip
    for curve, name in (("consensus", "relative consensus distance"), ("consensus_absolute", "consensus distance")):
        title = f"{name.capitalize()} during training"
        found.append(Chart(curve, title, "steps", name, NUMBER, NUMBER, "step", curve))
    return found


def quantity_of(metric: Metric) -> Quantity:
    """Return the quantity in which a metric is measured."""
    return FRACTION if metric.name == "accuracy" else NUMBER
