"""Which charts the page has, and what of a row is drawn in them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gossip.lab.report.quantities import BYTES, FRACTION, NUMBER, SECONDS, Quantity
from gossip.lab.report.report_document import METHODS, Document, Metric, Row
from gossip.lab.report.scales import Scale
from gossip.lab.report.series import Panel

Point = tuple[float | None, float | None]

#: The share of a run that is left out when the lower end of the accuracy is looked for: all start near chance.
_START = 0.5


@dataclass(frozen=True)
class Chart:
    """Two of the curves against each other, with the result at the end.

    Attributes
    ----------
    identifier, title
        Of its section.
    x_title, y_title, x, y
        The axes.
    x_curve, y_curve
        Names in :class:`Curves`.
    y_value
        The name of the value that stands at the end of a curve, with its spread; None: the curve's last point.
    target
        A level to be reached.
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

    def line(self, row: Row) -> list[Point]:
        """The curve of a row."""
        if row.curves is None:
            return []
        return list(zip(getattr(row.curves, self.x_curve), getattr(row.curves, self.y_curve), strict=True))

    def end(self, row: Row) -> tuple[float, float, float | None] | None:
        """Where a row ends: x, y and the spread of y; None where it is not known."""
        known = self._known(row)
        if self.y_value is None or row.values.get(self.y_value) is None:
            return (*known[-1], None) if known else None
        value = row.values[self.y_value]
        x = known[-1][0] if known else _end_of(self.x_curve, row)
        return None if x is None or value is None else (x, value.mean, value.spread)

    def scales(self, rows: Sequence[Row]) -> tuple[Scale, Scale] | None:
        """The axes that all rows share; None if there is nothing to draw."""
        y = self._y_scale(rows)
        if y is None:
            return None
        across: list[float] = []
        for row in rows:
            end = self.end(row)
            if end is not None and y.reaches(end[1]) and not self.is_level(row):
                across += [end[0], *(x for x, height in self._known(row) if height >= y.low)]
        # Levels alone have no place along the axis: any will do.
        return Scale.over(across or [0.0, 1.0], self.x, may_be_log=self.x is not NUMBER), y

    def is_level(self, row: Row) -> bool:
        """Whether a row stays at the beginning of the x-axis: it sends nothing, however long it runs."""
        end = self.end(row)
        return row.method == "local" and end is not None and end[0] == 0

    def _y_scale(self, rows: Sequence[Row]) -> Scale | None:
        """Where the rows of gossip have their place, and the baselines if they do not squeeze these.

        Replicas that never communicate may be useless, and with all-reduce they differ by rounding alone: a baseline
        that is farther away than the axis is long is left out.
        """
        values: dict[str, list[float]] = {method: [] for method in METHODS}
        for row in rows:
            values[row.method] += self._heights(row)
        compared = values.pop("gossip") or [value for of_method in values.values() for value in of_method]
        if not compared:
            return None
        if self.target is not None:
            compared.append(self.target)
        may_be_log = self.y is not FRACTION
        scale = Scale.over(compared, self.y, may_be_log=may_be_log)
        for of_method in values.values():
            shares = [share for value in of_method if (share := scale.share(value)) is not None]
            if shares and min(shares) >= -1.0 and max(shares) <= 2.0:
                compared += of_method
        return Scale.over(compared, self.y, may_be_log=may_be_log)

    def _known(self, row: Row) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.line(row) if x is not None and y is not None]

    def _heights(self, row: Row) -> list[float]:
        """What the axis should show of a row; of an accuracy not the beginning."""
        line, end = self._known(row), self.end(row)
        start = math.floor(_START * len(line)) if self.higher_is_better else 0
        heights = [y for _, y in line[start:]]
        if end is not None:
            _, y, spread = end
            heights += [y - (spread or 0.0), y + (spread or 0.0)]
        return heights


def charts(document: Document) -> list[Chart]:
    """The charts of a page, whether or not there is anything to draw in them."""
    metric = document.metric
    return [
        _of_metric(metric, "bytes", "against bytes", "sent per rank", BYTES),
        _of_metric(metric, "time", "against predicted time", "predicted time", SECONDS),
        Chart(
            "consensus", "Consensus during training", "steps", "relative consensus distance", NUMBER, NUMBER,
            "step", "consensus",
        ),
    ]  # fmt: skip


def quantity_of(metric: Metric) -> Quantity:
    """In what a metric is measured."""
    return FRACTION if metric.name == "accuracy" else NUMBER


def drawable(chart: Chart, panels: Sequence[Panel]) -> tuple[Scale, Scale] | None:
    """The scales that all panels of a chart share."""
    return chart.scales([series.row for panel in panels for series in panel.series])


def segments(line: Sequence[Point], x: Scale, y: Scale) -> Iterator[list[tuple[float, float]]]:
    """The drawable parts of a curve, in shares of both axes: it is interrupted where a value is missing."""
    segment: list[tuple[float, float]] = []
    for across, up in line:
        place = (x.share(across) if across is not None else None, y.share(up) if up is not None else None)
        if place[0] is not None and place[1] is not None:
            segment.append((place[0], place[1]))
        elif segment:
            yield segment
            segment = []
    if segment:
        yield segment


def _of_metric(metric: Metric, identifier: str, against: str, x_title: str, x: Quantity) -> Chart:
    name = metric.name
    return Chart(
        identifier,
        f"{name.capitalize()} {against}",
        x_title,
        f"{name} of the averaged model",
        x,
        quantity_of(metric),
        {"bytes": "bytes", "time": "time_s"}[identifier],
        "metric",
        f"averaged_{name}",
        metric.target,
        metric.higher_is_better,
    )


def _end_of(x_curve: str, row: Row) -> float | None:
    """Where on the x-axis a row ends, by its values."""
    if x_curve == "time_s":
        return row.mean("predicted_total_time_s")
    per_step, steps = row.mean("bytes_per_step"), row.mean("steps")
    return None if per_step is None or steps is None else per_step * steps
