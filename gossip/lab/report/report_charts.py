"""The charts of the page: which are drawn, their common legend, and the data from which charts.js draws them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from gossip.lab.report.chart_specs import CONFIG, make_curves, make_ends, make_spec
from gossip.lab.report.charts import Chart, charts
from gossip.lab.report.report_document import Document
from gossip.lab.report.scales import Scale
from gossip.lab.report.series import Panel, Series


@dataclass(frozen=True)
class Drawn:
    """A chart with its axes, and the panels in which there is anything to draw."""

    chart: Chart
    x: Scale
    y: Scale
    panels: tuple[Panel, ...]

    def beyond(self, panel: Panel) -> list[str]:
        """Return the ends of a panel's rows that lie beyond the axes, in words."""
        ends = [(series.name, self.chart.end(series.row)) for series in panel.series]
        return [end.words(name) for name, end in ends if end is not None and not end.is_within(self.x, self.y)]


def draw_charts(document: Document, divided: Sequence[Panel]) -> list[Drawn]:
    """Return the charts in which there is anything to draw."""
    drawn = []
    for chart in charts(document):
        scales = chart.scales([series.row for panel in divided for series in panel.series])
        if scales is not None:
            members = (panel for panel in divided if any(chart.end(series.row) for series in panel.series))
            drawn.append(Drawn(chart, *scales, tuple(members)))
    return drawn


def legend_of(divided: Sequence[Panel], drawn: Sequence[Drawn]) -> dict[str, list[Series]]:
    """Return the rows that an entry of the legend controls, by their name, which they share with their style."""
    entries: dict[str, list[Series]] = {}
    for series in _every(divided):
        if any(each.chart.end(series.row) for each in drawn):
            entries.setdefault(series.name, []).append(series)
    return entries


def _every(divided: Sequence[Panel]) -> list[Series]:
    return [series for panel in divided for series in panel.series]


def chart_data(divided: Sequence[Panel], drawn: Sequence[Drawn]) -> str:
    """Return the data of the charts as JSON, with each curve and each chart specification once."""
    # Baselines come last, so that they are drawn on top of the rows that are compared with them.
    every = sorted(_every(divided), key=lambda series: series.row.method != "gossip")
    data = {
        "config": CONFIG,
        "curves": make_curves(every),
        "charts": [
            {
                "identifier": each.chart.identifier,
                "spec": make_spec(each.chart, divided, each.x, each.y),
                "ends": make_ends(each.chart, every, each.x, each.y),
                "panels": [
                    {
                        "description": f"{', '.join(filter(None, (each.chart.title, panel.title)))}: "
                        f"{each.chart.y_title} against {each.chart.x_title}. The table has the numbers at the end of "
                        "each line.",
                        "rows": [series.index for series in panel.series],
                    }
                    for panel in each.panels
                ],
            }
            for each in drawn
        ],
    }
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
