"""Charts as Vega-Lite specifications.

Colours are variables of the page's style sheet, such as ``var(--c0)``: charts.js substitutes their values in the page's
colour scheme, and the rows of one panel for the named data of a layer, ``curves`` or ``ends``. It also sets two
parameters: ``shown``, the indices of the rows that pass the filters and the legend, and ``brought``, the name that is
highlighted, or null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gossip.lab.report.charts import Chart
from gossip.lab.report.report_document import Row
from gossip.lab.report.scales import Scale
from gossip.lab.report.series import Panel, Series, Style

Spec = dict[str, Any]

_IS_SHOWN = "indexof(shown, datum.index) >= 0"
_HAS_PLACE = f"{_IS_SHOWN} && !datum.is_level && isValid(datum.x) && isValid(datum.y)"
_IS_BROUGHT = "brought !== null && datum.name === brought"
_IS_MUTED = "brought !== null && datum.name !== brought"
_FONT = 'system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
#: Dragging with a mouse or a pen pans the panel, and the wheel with Ctrl or Meta zooms; otherwise the page scrolls.
_ZOOM = {
    "name": "zoom",
    "bind": "scales",
    "select": {
        "type": "interval",
        "translate": "[pointerdown[event.pointerType !== 'touch'], window:pointerup] > window:pointermove!",
        "zoom": "wheel![event.ctrlKey || event.metaKey]",
        "clear": "dblclick",
    },
}
CONFIG: Spec = {
    "background": "var(--paper)",
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--faint)", "titleColor": "var(--ink)", "gridColor": "var(--rule)", "gridOpacity": 0.6,
        "domainColor": "var(--strong-rule)", "tickColor": "var(--strong-rule)", "labelFontSize": 11,
        "titleFontSize": 11.5, "titleFontWeight": "normal", "labelOverlap": "greedy", "labelSeparation": 4,
    },
    "legend": {"labelColor": "var(--ink)", "labelFontSize": 12, "labelLimit": 320, "symbolStrokeWidth": 2},
    "title": {"color": "var(--ink)", "subtitleColor": "var(--faint)", "fontSize": 14, "anchor": "start", "offset": 12},
}  # fmt: skip


def make_spec(chart: Chart, panels: Sequence[Panel], x: Scale, y: Scale) -> Spec:
    """Return the specification that all panels of a chart share."""
    every = [series for panel in panels for series in panel.series]
    levels = [series.index for series in every if (end := chart.end(series.row)) is not None and end.is_level]
    named = list({series.name: series for series in every}.values())
    return {
        "height": 260,
        "autosize": {"type": "fit", "contains": "padding"},
        "params": [{"name": "shown", "value": []}, {"name": "brought", "value": None}],
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "scale": _scale(x), "axis": _axis(chart.x_title, x)},
            "y": {
                "field": "y", "type": "quantitative", "scale": _scale(y),
                "axis": _axis(chart.y_title, y) | {
                    "titleAngle": 0, "titleAnchor": "end", "titleAlign": "left", "titleBaseline": "bottom",
                    "titleX": -32, "titleY": -8, "minExtent": 34,
                },
            },
            "color": _by_name(named, lambda style: style.colour),
            "opacity": {"condition": {"test": _IS_MUTED, "value": 0.12}, "value": 1},
        },
        "layer": [
            *_target(chart, y),
            _levels(chart, named),
            *_curves(chart, named, levels, x, y),
            *_ends(chart, named),
        ],
    }  # fmt: skip


def make_ends(chart: Chart, every: Sequence[Series], x: Scale, y: Scale) -> list[Spec]:
    """Return the end point of each row, in the units of the axes and in words."""
    ends = []
    for series in every:
        end = chart.end(series.row)
        if end is None:
            continue
        low, high = end.y - (end.spread or 0.0), end.y + (end.spread or 0.0)
        ends.append({
            "index": series.index,
            "name": series.name,
            "is_level": end.is_level,
            # What has no place on a logarithmic axis, such as zero, is not drawn.
            "x": None if x.share(end.x) is None else end.x / x.unit.size,
            "y": None if y.share(end.y) is None else end.y / y.unit.size,
            "low": (max(low, y.low) if y.is_log else low) / y.unit.size,
            "high": high / y.unit.size,
            "value": end.height,
            "where": end.width,
            "words": end.words(series.name),
        })  # fmt: skip
    return ends


def make_curves(rows: Sequence[Row], names: dict[int, str]) -> list[Spec]:
    """Return the curves of the rows whose indices are keys of ``names``, rounded to five significant digits."""
    found: list[Spec] = []
    for index, name in names.items():
        if (curves := rows[index].curves) is not None:
            found.append({"index": index, "name": name})
            for key, curve in vars(curves).items():
                found[-1][key] = [None if value is None else float(f"{value:.5g}") for value in curve]
    return found


def _scale(scale: Scale) -> Spec:
    kind = {"type": "log"} if scale.is_log else {"zero": False}
    return {"domain": [scale.low / scale.unit.size, scale.high / scale.unit.size], "nice": False, **kind}


def _axis(title: str, scale: Scale) -> Spec:
    number_format = {"format": "~g"} if scale.is_log else {}
    return {"title": _with_unit(title, scale), "tickCount": 6, **number_format}


def _with_unit(title: str, scale: Scale) -> str:
    return f"{title}, {scale.unit.suffix.strip()}" if scale.unit.suffix else title


def _by_name(named: Sequence[Series], look: Callable[[Style], Any]) -> Spec:
    looks = {"domain": [series.name for series in named], "range": [look(series.style) for series in named]}
    return {"field": "name", "type": "nominal", "scale": looks, "legend": None}


def _dash(named: Sequence[Series]) -> Spec:
    return _by_name(named, lambda style: style.dash or [1, 0])


def _target(chart: Chart, y: Scale) -> list[Spec]:
    """Return the layers of the target: a line, and its label above the frame, where no curve can cross it."""
    if chart.target is None:
        return []
    data = {"values": [{"y": chart.target / y.unit.size}]}
    rule = {"type": "rule", "strokeDash": [1, 3], "color": "var(--ink)", "clip": True, "aria": False}
    text = {
        "type": "text", "text": f"\u2508\u2508 target {chart.y.text(chart.target)}", "align": "right",
        "baseline": "bottom", "fontSize": 11, "color": "var(--ink)", "clip": False, "aria": False,
    }  # fmt: skip
    plain: Spec = {"x": None, "color": None, "opacity": None}
    return [
        {"data": data, "mark": rule, "encoding": plain},
        {"data": data, "mark": text, "encoding": {**plain, "x": {"value": "width"}, "y": {"value": -10}}},
    ]


def _levels(chart: Chart, named: Sequence[Series]) -> Spec:
    """Return the layer of rows that never leave the start of the x-axis, drawn as horizontal lines across it."""
    return {
        "data": {"name": "ends"},
        "transform": [{"filter": f"{_IS_SHOWN} && datum.is_level"}],
        "mark": {"type": "rule", "clip": True, "strokeWidth": 2.4},
        "encoding": {
            "x": None, "strokeDash": _dash(named), "description": {"field": "words"}, "tooltip": _end_tooltip(chart),
        },
    }  # fmt: skip


def _curves(chart: Chart, named: Sequence[Series], levels: Sequence[int], x: Scale, y: Scale) -> list[Spec]:
    """Return the layers of the curves: the lines, and invisible points that carry the tooltips."""
    names = list(dict.fromkeys([chart.x_curve, chart.y_curve, "step"]))
    fields = {chart.x_curve: "x", chart.y_curve: "y"}
    data = {
        "data": {"name": "curves"},
        "transform": [
            {"filter": f"{_IS_SHOWN} && indexof({sorted(set(levels))}, datum.index) < 0"},
            {"flatten": names, "as": [f"own_{name}" for name in names]},
            *({"calculate": _placed(f"own_{name}", scale), "as": fields[name]}
              for name, scale in ((chart.x_curve, x), (chart.y_curve, y))),
        ],
    }  # fmt: skip
    order = {"detail": {"field": "index"}, "order": {"field": "own_step", "type": "quantitative"}}
    is_baseline = [series.name for series in named if series.row.method != "gossip"]
    width = [{"test": _IS_BROUGHT, "value": 3}, {"test": f"indexof({is_baseline}, datum.name) >= 0", "value": 2.4}]
    steps = [] if chart.x_curve == "step" else [{"field": "own_step", "title": "steps"}]
    tooltip = [
        {"field": "name", "title": "title"},
        {"field": "y", "title": _with_unit(chart.y_title, y), "format": ".4~r"},
        {"field": "x", "title": _with_unit(chart.x_title, x), "format": ".4~r"},
        *steps,
    ]
    line = {"type": "line", "clip": True, "strokeJoin": "round", "aria": False}
    point = {"type": "point", "filled": True, "size": 90, "clip": True, "aria": False}
    return [
        {
            **data, "params": [_ZOOM], "mark": line,
            "encoding": {**order, "strokeDash": _dash(named), "strokeWidth": {"condition": width, "value": 1.6}},
        },
        {
            **data, "mark": point,
            "encoding": {"opacity": {"value": 0}, "tooltip": tooltip},
        },
    ]  # fmt: skip


def _placed(field: str, scale: Scale) -> str:
    """Return the Vega expression of a value in the unit of its axis; null interrupts the line."""
    known = f"isValid(datum.{field})" + (f" && datum.{field} > 0" if scale.is_log else "")
    return f"{known} ? datum.{field} / {scale.unit.size!r} : null"


def _ends(chart: Chart, named: Sequence[Series]) -> list[Spec]:
    """Return the layers of the spreads and of the end points."""
    shapes = _by_name(named, lambda style: style.shape)
    rule = {"type": "rule", "clip": True, "strokeWidth": 1.5, "aria": False}
    point = {
        "type": "point", "filled": True, "size": 75, "stroke": "var(--paper)", "strokeWidth": 0.8, "clip": True,
    }  # fmt: skip
    return [
        {
            "data": {"name": "ends"},
            "transform": [{"filter": f"{_HAS_PLACE} && datum.high > datum.low"}],
            "mark": rule,
            "encoding": {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}},
        },
        {
            "data": {"name": "ends"},
            "transform": [{"filter": _HAS_PLACE}],
            "mark": point,
            "encoding": {"shape": shapes, "description": {"field": "words"}, "tooltip": _end_tooltip(chart)},
        },
    ]


def _end_tooltip(chart: Chart) -> list[Spec]:
    return [
        {"field": "name", "title": "title"},
        {"field": "value", "title": chart.y_title},
        {"field": "where", "title": chart.x_title},
    ]
