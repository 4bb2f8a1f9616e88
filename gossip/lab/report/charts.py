"""The charts of the page, the part of a row that each of them shows, and how that looks: panel, name and style."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gossip.lab.report.quantities import BYTES, FRACTION, NUMBER, SECONDS, Quantity, Scale
from gossip.lab.report.report_document import Document, Row, Value

NUM_COLOURS = 8
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))
DIVIDING = ("world_size", "partition", "condition")
"""The settings by which rows are compared, and drawn, apart."""
_TOLD_APART = ("algorithm", "compression", "engine")


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
        """Whether it lies within the axes."""
        return y.reaches(self.y) and (self.is_level or x.reaches(self.x))

    def words(self, name: str) -> str:
        """Describe the end point of the row with this name."""
        return f"{name}: {self.height} at {self.width}"


class Chart(NamedTuple):
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

        All-reduce, no communication and the target are always inside; see :meth:`Scale.over` for the others.
        """
        drawn = [(row, end) for row in rows if (end := self.end(row)) is not None]
        if not drawn:
            return None
        x: tuple[list[float], list[float]] = [], []  # of the rows that are compared, and what is always inside
        y: tuple[list[float], list[float]] = [], [] if self.target is None else [self.target]
        for row, end in drawn:
            known, is_baseline = self._known(row), row.method != "gossip"
            spread = end.spread or 0.0
            y[is_baseline].extend([*(height for _, height in known), end.y - spread, end.y, end.y + spread])
            if not end.is_level:
                x[is_baseline].extend(place for place, _ in known)
        # If there are only levels, which span the whole x-axis, any range will do.
        across = x if any(x) else ([0.0, 1.0], [])
        may_be_log = self.x_curve != "step"
        ends = [end.y for _, end in drawn]
        return Scale.over(*across, self.x, may_be_log=may_be_log), Scale.over(*y, self.y, may_be_log=True, ends=ends)

    def _known(self, row: Row) -> list[tuple[float, float]]:
        if row.curves is None:
            return []
        line = zip(row.curves.named(self.x_curve), row.curves.named(self.y_curve), strict=True)
        return [(x, y) for x, y in line if x is not None and y is not None]


def charts(document: Document) -> list[Chart]:
    """The charts of a page, whether or not there is anything to draw in them."""
    metric = document.metric
    against = {"time": ("predicted time", SECONDS, "time_s"), "bytes": ("sent per rank", BYTES, "bytes")}
    against["steps"] = ("steps", NUMBER, "step")
    found = []
    for name in sorted(RESULTS, key=lambda name: name != metric.name):
        is_metric = name == metric.name
        for identifier, (x_title, x, curve) in against.items():
            title = f"{name.capitalize()} against {'bytes' if curve == 'bytes' else x_title}"
            found.append(Chart(
                identifier if is_metric else f"{name}_{identifier}", title, x_title, f"{name} of the averaged model",
                x, RESULTS[name], curve, "metric" if is_metric else name, f"averaged_{name}",
                metric.target if is_metric else None,
            ))  # fmt: skip
    for curve, name in (("consensus", "relative consensus distance"), ("consensus_absolute", "consensus distance")):
        title = f"{name.capitalize()} during training"
        found.append(Chart(curve, title, "steps", name, NUMBER, NUMBER, "step", curve))
    return found


RESULTS = {"accuracy": FRACTION, "loss": NUMBER}
"""The quantities in which results are measured, of which one is the metric."""


class Style(NamedTuple):
    """The visual style of a series.

    The combination of colour (a variable of the style sheet), dash pattern (lengths of strokes and gaps) and marker
    shape (its name in Vega) is unique for 160 series; baselines have the colour of the text.
    """

    colour: str
    dash: tuple[int, ...]
    shape: str


_BASELINES = {"ddp": Style("var(--ink)", (), "square"), "local": Style("var(--ink)", (5, 4), "circle")}


@dataclass(frozen=True)
class Series:
    """A row as it is drawn. Rows that differ only in the settings that divide the panels share name and style."""

    index: int
    row: Row
    name: str
    style: Style


class Panel(NamedTuple):
    """Rows that are drawn together. The title states what they share; it is empty if all rows are in one panel."""

    title: str
    series: tuple[Series, ...]


def setting(row: Row, name: str) -> str | None:
    """Return a setting for display; for a row without a topology, the topology is its label."""
    value = getattr(row, name)
    if value is None:
        return row.label if name == "topology" else None
    return str(value).replace("_", " ") if name == "algorithm" else str(value)


def told(row: Row, name: str) -> str | None:
    """Return a setting in words; None if there is nothing to tell."""
    text = setting(row, name)
    if name == "world_size":
        return f"{text} rank{'' if text == '1' else 's'}"
    return None if text == "none" else text


def varying(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return the settings in which the rows differ. A setting that does not apply to a row (null) is no difference."""
    return [name for name in names if len({setting(row, name) for row in rows} - {None}) > 1]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Divide the rows into panels by ranks, partition and condition; the names tell the other settings apart."""
    dividing = varying(rows, DIVIDING)
    divided: dict[tuple[str | None, ...], list[Series]] = {}
    for series in _named(rows, varying(rows, _TOLD_APART)):
        divided.setdefault(tuple(setting(series.row, name) for name in dividing), []).append(series)
    return [
        Panel(", ".join(filter(None, (told(members[0].row, name) for name in dividing))), tuple(members))
        for members in divided.values()
    ]


def _named(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """Assign names and styles in order of appearance, so that a topology looks the same in every panel."""
    numbers: dict[str, int] = {}
    series = []
    for index, row in enumerate(rows):
        name = ", ".join(filter(None, (row.label, *(told(row, each) for each in names))))
        if (style := _BASELINES.get(row.method)) is None:
            number = numbers.setdefault(name, len(numbers))
            dash = DASHES[number // NUM_COLOURS % len(DASHES)]
            style = Style(f"var(--c{number % NUM_COLOURS})", dash, SHAPES[number % len(SHAPES)])
        series.append(Series(index, row, name, style))
    return series
