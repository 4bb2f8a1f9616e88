"""The appearance of each row of a sweep in the charts: its panels, name, colour, dash pattern and marker shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossip.lab.report.report_document import Row

NUM_COLOURS = 8
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))
DIVIDING = ("world_size", "partition", "condition")
"""The settings by which rows are compared, and drawn, apart."""
_TOLD_APART = ("algorithm", "compression", "engine")


@dataclass(frozen=True)
class Style:
    """The visual style of a series.

    The combination of colour (a variable of the style sheet), dash pattern (lengths of strokes and gaps) and marker
    shape (its name in Vega) is unique for 160 series; baselines have the colour of the text.
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
    """A row as it is drawn. Rows that differ only in the settings that divide the panels share name and style."""

    index: int
    row: Row
    name: str
    style: Style


@dataclass(frozen=True)
class Panel:
    """Rows that are drawn together. The title states what they share; it is empty if all rows are in one panel."""

    title: str
    series: tuple[Series, ...]


def setting(row: Row, name: str) -> str | None:
    """Return a setting for display; for a row without a topology, the topology is its label."""
    value = getattr(row, name)
    if value is None:
        return row.label if name == "topology" else None
    return str(value).replace("_", " ") if name == "algorithm" else str(value)


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
        Panel(", ".join(_facet_text(*pair) for pair in zip(dividing, key, strict=True) if pair[1]), tuple(members))
        for key, members in divided.items()
    ]


def _named(rows: Sequence[Row], names: Sequence[str]) -> list[Series]:
    """Assign names and styles in order of appearance, so that a topology looks the same in every panel."""
    numbers: dict[str, int] = {}
    series = []
    for index, row in enumerate(rows):
        own = [setting(row, name) for name in names]
        name = ", ".join([row.label, *(text for text in own if text is not None and text != "none")])
        style = _BASELINES.get(row.method) or Style.numbered(numbers.setdefault(name, len(numbers)))
        series.append(Series(index, row, name, style))
    return series


def _facet_text(name: str, text: str | None) -> str:
    return f"{text} rank{'' if text == '1' else 's'}" if name == "world_size" else str(text)
