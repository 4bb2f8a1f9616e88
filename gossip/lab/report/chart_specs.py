"""Charts as Vega-Lite specifications.

Colours are variables of the page's style sheet, such as ``var(--c0)``. charts.js substitutes the rows of one panel for
the named data of a layer, ``curves`` or ``ends``. It also sets two parameters: ``shown``, the indices of the rows that
pass the filters and the legend, and ``brought``, the name that is highlighted, or null.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gossip.lab.report.charts import Chart, Series, Style
from gossip.lab.report.quantities import Scale

Spec = dict[str, Any]

_IS_SHOWN = "indexof(shown, datum.index) >= 0"
_IS_END = f"{_IS_SHOWN} && !datum.is_level"
_IS_BROUGHT = "brought !== null && datum.name === brought"
_IS_MUTED = "brought !== null && datum.name !== brought"
_FONT = 'system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
#: Dragging with a mouse or a pen pans the panel, and the wheel with Ctrl or Meta zooms; otherwise the page scrolls.
_ZOOM = {
    "name": "zoom", "bind": "scales",
    "select": {
        "type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey]", "clear": "dblclick",
        "translate": "[pointerdown[event.pointerType !== 'touch'], window:pointerup] > window:pointermove!",
    },
}  # fmt: skip
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


def make_spec(chart: Chart, every: Sequence[Series], x: Scale, y: Scale) -> Spec:
    """Return the specification that all panels of a chart share, over all of their rows."""
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
            *_break(y),
            _levels(chart, {"strokeWidth": 2.4}, {"strokeDash": _dash(named)}),
            *_curves(chart, every, named, x, y),
            # They are pointed at within a few pixels.
            _levels(chart, {"strokeWidth": 14, "opacity": 0, "aria": False}, {"opacity": None}),
            *_ends(chart, named),
        ],
    }  # fmt: skip


def make_ends(chart: Chart, every: Sequence[Series], x: Scale, y: Scale) -> list[Spec]:
    """Return the end point of each row, in the units of the axes and in words."""
    ends = []
    for series in every:
        if (end := chart.end(series.row)) is None:
            continue
        ends.append({
            "index": series.index, "name": series.name, "is_level": end.is_level,
            "x": x.place(end.x), "y": y.place(end.y),
            "low": y.place(end.y - (end.spread or 0.0)), "high": y.place(end.y + (end.spread or 0.0)),
            "value": end.height, "where": end.width, "words": end.words(series.name),
        })  # fmt: skip
    return ends


def make_curves(every: Sequence[Series]) -> list[Spec]:
    """Return all curves by their names, which are the same for each row, rounded to five significant digits."""
    known = [(series, series.row.curves) for series in every if series.row.curves is not None]
    names = dict.fromkeys(name for _, curves in known for name in curves.model_dump())
    return [
        {
            "index": series.index,
            "name": series.name,
            **{name: [None if y is None else float(f"{y:.5g}") for y in curves.named(name)] for name in names},
        }
        for series, curves in known
    ]


def _scale(scale: Scale) -> Spec:
    kind = {"type": "log", "reverse": scale.is_from_best} if scale.is_log else {"zero": False}
    return {"domain": [scale.low / scale.unit.size, scale.high / scale.unit.size], "nice": False, **kind}


def _axis(title: str, scale: Scale) -> Spec:
    axis: Spec = {"title": _with_unit(title, scale), "tickCount": 6}
    if scale.is_log:
        axis["format"] = "~g"
    if scale.is_from_best:
        # Where labels are too many, Vega leaves out some.
        assert scale.quantity.best is not None
        best = scale.quantity.best / scale.unit.size
        axis["labelExpr"] = f"datum.label === '' ? '' : format({best!r} - datum.value, '.6~g')"
    if scale.break_at is not None:
        label = axis.get("labelExpr", "datum.label")
        axis["labelExpr"] = f"datum.value < {scale.break_at / scale.unit.size!r} ? '' : {label}"
    return axis


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
    data = {"values": [{"y": y.place(chart.target)}]}
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


def _break(y: Scale) -> list[Spec]:
    """Return the layers of a broken axis: a line at the break, and what is drawn in the strip beyond it."""
    if y.break_at is None:
        return []
    zero = f"\u2248 {(y.quantity.best or 0.0) / y.unit.size:g}"
    plain: Spec = {"x": None, "color": None, "opacity": None}
    rule = {"type": "rule", "strokeDash": [2, 4], "color": "var(--strong-rule)", "clip": True, "aria": False}
    text = {
        "type": "text", "text": zero, "align": "right", "baseline": "middle", "dx": -6, "fontSize": 11,
        "color": "var(--faint)", "clip": False, "aria": False,
    }  # fmt: skip
    return [
        {"data": {"values": [{"y": y.break_at / y.unit.size}]}, "mark": rule, "encoding": plain},
        {"data": {"values": [{"y": y.strip / y.unit.size}]}, "mark": text, "encoding": {**plain, "x": {"value": 0}}},
    ]


def _levels(chart: Chart, mark: Spec, encoding: Spec) -> Spec:
    """Return a layer of rows that never leave the start of the x-axis, drawn as horizontal lines across it."""
    return {
        "data": {"name": "ends"},
        "transform": [{"filter": f"{_IS_SHOWN} && datum.is_level"}],
        "mark": {"type": "rule", "clip": True, **mark},
        "encoding": {"x": None, "description": {"field": "words"}, "tooltip": _end_tooltip(chart), **encoding},
    }


def _curves(chart: Chart, every: Sequence[Series], named: Sequence[Series], x: Scale, y: Scale) -> list[Spec]:
    """Return the layers of the curves: bands over the seeds, lines, and points of which the nearest is pointed at.

    Each row's curve consists of the points at which it was measured, whatever was measured between them.
    """
    known = [series.row.curves.named(f"{chart.y_curve}_low") for series in every if series.row.curves is not None]
    has_band = any(value is not None for curve in known for value in curve)
    levels = sorted(series.index for series in every if (end := chart.end(series.row)) is not None and end.is_level)
    y_names = [chart.y_curve, *([f"{chart.y_curve}_low", f"{chart.y_curve}_high"] if has_band else [])]
    names = list(dict.fromkeys([chart.x_curve, *y_names, "step"]))
    fields = dict(zip(y_names, ("y", "low", "high"), strict=False))
    data = {
        "data": {"name": "curves"},
        "transform": [
            {"filter": f"{_IS_SHOWN} && indexof({levels}, datum.index) < 0"},
            {"flatten": names, "as": [f"own_{name}" for name in names]},
            {"filter": " && ".join(f"isValid(datum.own_{name})" for name in (chart.x_curve, chart.y_curve))},
            {"calculate": _placed(f"datum.own_{chart.x_curve}", x), "as": "x"},
            *({"calculate": _placed(f"datum.own_{name}", y), "as": field} for name, field in fields.items()),
            {"calculate": f"datum.own_{chart.x_curve} / {x.unit.size!r}", "as": "x_value"},
            {"calculate": f"datum.own_{chart.y_curve} / {y.unit.size!r}", "as": "y_value"},
        ],
    }  # fmt: skip
    order = {"detail": {"field": "index"}, "order": {"field": "own_step", "type": "quantitative"}}
    is_baseline = [series.name for series in named if series.row.method != "gossip"]
    width = [{"test": _IS_BROUGHT, "value": 3}, {"test": f"indexof({is_baseline}, datum.name) >= 0", "value": 2.4}]
    tooltip = [
        {"field": "name", "title": "title"},
        {"field": "y_value", "title": _with_unit(chart.y_title, y), "format": ".4~r"},
        {"field": "x_value", "title": _with_unit(chart.x_title, x), "format": ".4~r"},
        *([] if chart.x_curve == "step" else [{"field": "own_step", "title": "steps"}]),
    ]
    band = {
        **data,
        "mark": {"type": "area", "clip": True, "aria": False},
        "encoding": {
            "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}, "detail": {"field": "index"},
            "opacity": {"condition": {"test": _IS_MUTED, "value": 0.02}, "value": 0.16},
        },
    }  # fmt: skip
    line = {"type": "line", "clip": True, "strokeJoin": "round", "aria": False}
    point = {"type": "point", "filled": True, "size": 60, "clip": True, "aria": False}
    nearest = {"type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout"}
    return [
        *([band] if has_band else []),
        {
            **data, "params": [_ZOOM], "mark": line,
            "encoding": {**order, "strokeDash": _dash(named), "strokeWidth": {"condition": width, "value": 1.6}},
        },
        {
            **data, "params": [{"name": "nearest", "select": nearest}], "mark": point,
            "encoding": {
                "opacity": {"condition": {"param": "nearest", "empty": False, "value": 1}, "value": 0},
                "tooltip": tooltip,
            },
        },
    ]  # fmt: skip


def _placed(value: str, scale: Scale) -> str:
    """Return the Vega expression of where a point of a curve is drawn, in the unit of its axis.

    Beyond the axis it is cut off; on a logarithmic one, so is what is not positive, unless the axis is broken.
    """
    if scale.is_from_best:
        value = f"({scale.quantity.best!r} - {value})"
    if scale.break_at is not None:
        return f"({value} < {scale.break_at!r} ? {scale.strip!r} : {value}) / {scale.unit.size!r}"
    return (f"max({value}, {1e-3 * scale.low!r})" if scale.is_log else value) + f" / {scale.unit.size!r}"


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
            "transform": [{"filter": f"{_IS_END} && datum.high !== datum.low"}],
            "mark": rule,
            "encoding": {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}},
        },
        {
            "data": {"name": "ends"},
            "transform": [{"filter": _IS_END}],
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
