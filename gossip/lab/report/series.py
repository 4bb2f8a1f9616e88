"""How each row of a sweep is drawn: in which panels, in which colour, dashes and shape, and under which name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossip.lab.report.report_document import Row

NUM_COLOURS = 8
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))
#: More lines than these in one panel are divided further, where the rows differ in something to divide them by.
_MOST_LINES = 12
_ALWAYS_DIVIDE = ("world_size", "partition", "condition")
_DIVIDE_IF_CROWDED = ("algorithm", "compression", "engine")

Key = tuple[str | None, ...]


@dataclass(frozen=True)
class Style:
    """How a series looks. Colour, dashes and shape together differ for 160 series; baselines are in the colour of text.

    Attributes
    ----------
    colour
        A variable of the page's style sheet.
    dash
        Lengths of strokes and gaps; none for a whole line.
    shape
        Of marks, as Vega names it.
    """

    colour: str
    dash: tuple[int, ...]
    shape: str

    @classmethod
    def numbered(cls, number: int) -> Style:
        dash = DASHES[number // NUM_COLOURS % len(DASHES)]
        return cls(f"var(--c{number % NUM_COLOURS})", dash, SHAPES[number % len(SHAPES)])


_BASELINES = {"ddp": Style("var(--ink)", (), "square"), "local": Style("var(--ink)", (5, 4), "circle")}


@dataclass(frozen=True)
class Series:
    """A row as it is drawn. Rows that differ only in what divides the panels have the same name and style."""

    index: int
    row: Row
    name: str
    style: Style


@dataclass(frozen=True)
class Panel:
    """Rows that are drawn together. The title says what they share; it is empty where all rows are in one panel."""

    title: str
    series: tuple[Series, ...]


def setting(row: Row, name: str) -> str | None:
    """A setting as people read it; the topology of a row without one is its label."""
    value = getattr(row, name)
    if value is None:
        return row.label if name == "topology" else None
    return str(value).replace("_", " ") if name == "algorithm" else str(value)


def varying(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Which settings the rows differ in. What does not apply to a row (null) is no difference."""
    return [name for name in names if len({setting(row, name) for row in rows} - {None}) > 1]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Divide the rows by ranks, partition and condition, and further where too many lines would be in one panel."""
    dividing = varying(rows, _ALWAYS_DIVIDE)
    crowding = varying(rows, _DIVIDE_IF_CROWDED)
    while crowding and _most_lines(rows, dividing) > _MOST_LINES:
        dividing.append(crowding.pop(0))
    series = _named(rows, crowding)
    return [
        Panel(
            ", ".join(_facet_text(name, text) for name, text in zip(dividing, key, strict=True) if text is not None),
            tuple(series[index] for index in members),
        )
        for key, members in _divide(rows, dividing).items()
    ]


def _divide(rows: Sequence[Row], names: Sequence[str]) -> dict[Key, list[int]]:
    """Indices of the rows by their settings.

    A row to which a setting does not apply, such as all-reduce without an algorithm, is in every division that agrees
    with it otherwise.
    """
    keys: list[Key] = [tuple(_divided_by(row, name) for name in names) for row in rows]
    divided: dict[Key, list[int]] = {key: [] for key in keys if None not in key}
    for index, key in enumerate(keys):
        fitting = [
            whole for whole in divided if all(own in (None, text) for own, text in zip(key, whole, strict=True))
        ] or [key]
        for whole in fitting:
            divided.setdefault(whole, []).append(index)
    return divided


def _divided_by(row: Row, name: str) -> str | None:
    """What others are compared with is not compressed, but belongs beside those that are."""
    text = setting(row, name)
    return None if text == "none" and row.method != "gossip" else text


def _most_lines(rows: Sequence[Row], names: Sequence[str]) -> int:
    return max(sum(rows[index].method == "gossip" for index in members) for members in _divide(rows, names).values())


def _named(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """Number the names in order of appearance, so that a topology looks the same in every panel."""
    numbers: dict[str, int] = {}
    series = []
    for index, row in enumerate(rows):
        own = [setting(row, name) for name in names]
        name = ", ".join([row.label, *(text for text in own if text is not None and text != "none")])
        style = _BASELINES.get(row.method) or Style.numbered(numbers.setdefault(name, len(numbers)))
        series.append(Series(index, row, name, style))
    return series


def _facet_text(name: str, text: str) -> str:
    if name == "world_size":
        return "1 rank" if text == "1" else f"{text} ranks"
    return f"compression {text}" if name == "compression" else text
