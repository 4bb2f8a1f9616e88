"""One panel of a chart as SVG. Colours are the page's style sheet's, by class; lengths are in units of the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from gossip.lab.report.charts import Chart, segments
from gossip.lab.report.markup import Element, element, extend
from gossip.lab.report.scales import Scale
from gossip.lab.report.series import Panel, Series

_WIDTH, _HEIGHT = 340.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 26.0, 28.0, 46.0
_CHARACTER, _LINE = 6.6, 13.0
#: Points of a line nearer to each other are one.
_LEAST_DISTANCE = 1.2
_MARK = 4.2
#: In heights of the frame.
_FARTHEST = 50.0


def draw_panel(chart: Chart, panel: Panel, x: Scale, y: Scale, identifier: str) -> Element:
    """Draw a panel: axes, the target, a line and a mark for each row."""
    name = ", ".join(filter(None, (chart.title, panel.title)))
    svg = element("svg", class_="plot", viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}", role="group", aria_label=name)
    clip = element("clipPath", element("rect", **_box()), id=f"clip-{identifier}")
    extend(svg, element("defs", clip), *_axes(chart, x, y))
    if chart.target is not None and (share := y.share(chart.target)) is not None:
        # Its name stands above the frame, where no line can run through it.
        right = _WIDTH - 4
        text = f"target {chart.y.tick_text(chart.target)}"
        sample_end = right - _CHARACTER * len(text) - 6
        sample = element("path", class_="target", d=f"M{sample_end - 20:.1f} 10H{sample_end:.1f}")
        extend(svg, element("path", class_="target", d=_level(share)), sample, _text(text, right, 14, "tick", "end"))
    # Baselines are drawn last: they are what the others are compared with.
    for series in sorted(panel.series, key=lambda series: series.row.method != "gossip"):
        drawn = _draw_series(chart, series, x, y, f"url(#clip-{identifier})")
        if drawn is not None:
            svg.append(drawn)
    return svg


def undrawn(chart: Chart, panel: Panel, x: Scale, y: Scale) -> list[Series]:
    """The rows of a panel that end where the axes do not reach, such as at zero on a logarithmic one."""
    return [
        series
        for series in panel.series
        if chart.end(series.row) is not None and _draw_series(chart, series, x, y, "") is None
    ]


def describe(chart: Chart, series: Series) -> str:
    """The end of a row in words."""
    end = chart.end(series.row)
    if end is None:
        return series.name
    across, up, spread = end
    height = chart.y.text(up) if spread is None else f"{chart.y.text(up)} (± {chart.y.text(spread)})"
    width = f"{across:g} steps" if chart.x_curve == "step" else f"{chart.x.text(across)}"
    return f"{series.name}: {height} at {width}"


def draw_mark(series: Series, x: float, y: float) -> Element:
    """The shape of a series."""
    size, shape = _MARK, series.style.shape
    if shape in ("circle", "ring"):
        return element("circle", class_=f"mark {shape}", cx=x, cy=y, r=size)
    paths = {
        "square": f"M{x - size:.1f} {y - size:.1f}h{2 * size:.1f}v{2 * size:.1f}h{-2 * size:.1f}z",
        "triangle": f"M{x:.1f} {y - 1.2 * size:.1f}l{1.2 * size:.1f} {2.1 * size:.1f}h{-2.4 * size:.1f}z",
        "diamond": f"M{x:.1f} {y - 1.35 * size:.1f}l{1.35 * size:.1f} {1.35 * size:.1f}"
        f"l{-1.35 * size:.1f} {1.35 * size:.1f}l{-1.35 * size:.1f} {-1.35 * size:.1f}z",
        "cross": f"M{x - size:.1f} {y - size:.1f}l{2 * size:.1f} {2 * size:.1f}m0 {-2 * size:.1f}"
        f"l{-2 * size:.1f} {2 * size:.1f}",
    }
    return element("path", class_=f"mark {shape}", d=paths[shape])


def _draw_series(chart: Chart, series: Series, x: Scale, y: Scale, clip: str) -> Element | None:
    """Draw what has a place; None if nothing has, or the end has none."""
    end = chart.end(series.row)
    if end is None or not y.reaches(end[1]):
        return None
    up = y.share(end[1]) or 0.0
    if chart.is_level(series.row):
        parts = [_line(series, _level(up), clip)]
    else:
        parts = list(_lines(chart, series, x, y, clip))
        across = x.share(end[0])
        if across is not None:
            parts.extend(_end_mark(series, y, across, up, end))
    if not parts:
        return None
    words = describe(chart, series)
    return element(
        "g", element("title", words), *parts, class_=f"series {series.style.css_class}", data_row=str(series.index),
        data_name=series.name, role="img", aria_label=words, tabindex="-1",
    )  # fmt: skip


def _lines(chart: Chart, series: Series, x: Scale, y: Scale, clip: str) -> Iterator[Element]:
    for segment in segments(chart.line(series.row), x, y):
        places = _thinned([(_across(across), _up(up)) for across, up in segment])
        if len(places) > 1:
            yield _line(series, "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in places), clip)


def _line(series: Series, path: str, clip: str) -> Element:
    return element("path", class_="line", d=path, clip_path=clip, stroke_dasharray=series.style.dash or None)


def _end_mark(
    series: Series, y: Scale, across: float, up: float, end: tuple[float, float, float | None]
) -> Iterator[Element]:
    place = _across(across)
    _, mean, spread = end
    if spread:
        low, high = y.share(mean - spread), y.share(mean + spread)
        low = 0.0 if low is None else max(low, 0.0)
        if high is not None:
            yield element("path", class_="spread", d=f"M{place:.1f} {_up(low):.1f}V{_up(min(high, 1.0)):.1f}")
    yield draw_mark(series, place, _up(up))
    yield element("circle", class_="target-area", cx=place, cy=_up(up), r=11)


def _axes(chart: Chart, x: Scale, y: Scale) -> Iterator[Element]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    across = [(_across(x.share(tick) or 0.0), chart.x.tick_text(tick)) for tick in x.ticks]
    up = [(_up(y.share(tick) or 0.0), chart.y.tick_text(tick)) for tick in y.ticks]
    across = _apart([(place, text) for place, text in across if place + _half(text) <= _WIDTH], _half)
    up = _apart(up, lambda _: _LINE / 2)
    grid = [f"M{place:.1f} {_TOP:g}V{bottom:g}" for place, _ in across]
    grid += [f"M{_LEFT:g} {place:.1f}H{right:g}" for place, _ in up]
    labels = [_text(text, place, bottom + 16, "tick", "middle") for place, text in across]
    labels += [_text(text, _LEFT - 7, place + 4, "tick", "end") for place, text in up]
    yield element("path", class_="grid", d="".join(grid))
    yield element("path", class_="frame", d=f"M{_LEFT:g} {_TOP:g}V{bottom:g}H{right:g}")
    yield from labels
    yield _text(chart.x_title, (_LEFT + right) / 2, _HEIGHT - 8, "axis-title", "middle")
    yield _text(chart.y_title, 4, 14, "axis-title")


def _apart(ticks: list[tuple[float, str]], half: Callable[[str], float]) -> list[tuple[float, str]]:
    """Leave out every other tick until the names of neighbours, each reaching ``half`` to both sides, do not touch."""
    while any(
        abs(place - other) < half(text) + half(following) + _CHARACTER / 2
        for (place, text), (other, following) in pairwise(ticks)
    ):
        ticks = ticks[::2]
    return ticks


def _half(text: str) -> float:
    return _CHARACTER * len(text) / 2


def _text(text: str, x: float, y: float, css_class: str, anchor: str | None = None) -> Element:
    return element("text", text, x=x, y=y, class_=css_class, text_anchor=anchor)


def _thinned(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out what is too near to the point before to be seen; the ends stay."""
    kept = [places[0]]
    for place in places[1:-1]:
        if abs(place[0] - kept[-1][0]) + abs(place[1] - kept[-1][1]) >= _LEAST_DISTANCE:
            kept.append(place)
    return kept if len(places) == 1 else [*kept, places[-1]]


def _across(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _up(share: float) -> float:
    # Where a line begins far below the frame, no viewer needs to know how far.
    share = min(max(share, -_FARTHEST), _FARTHEST)
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _level(share: float) -> str:
    return f"M{_LEFT:g} {_up(share):.1f}H{_WIDTH - _RIGHT:g}"


def _box() -> dict[str, float]:
    return {"x": _LEFT, "y": _TOP, "width": _WIDTH - _LEFT - _RIGHT, "height": _HEIGHT - _TOP - _BOTTOM}
