"""What the page's charts and table make of numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_documents import TOPOLOGIES, comparison, document, failed_row, row, value

from gossip.lab.report import Value, read_document, write_report
from gossip.lab.report.chart_specs import make_ends, make_spec
from gossip.lab.report.charts import charts
from gossip.lab.report.columns import best, columns
from gossip.lab.report.quantities import BYTES, FRACTION, NUMBER, SECONDS, Quantity
from gossip.lab.report.scales import Extent, Scale
from gossip.lab.report.series import DASHES, NUM_COLOURS, SHAPES, Style, panels


@pytest.mark.parametrize(
    ("quantity", "number", "text"),
    [
        (FRACTION, 0.97254, "97.25 %"),
        (BYTES, 0.0, "0 B"),
        (BYTES, 1024.0, "1 KiB"),
        (BYTES, 38400.0, "37.5 KiB"),
        (SECONDS, 0.0, "0 s"),
        (SECONDS, 0.0123, "12.3 ms"),
        (SECONDS, 90.0, "1.5 min"),
        (SECONDS, 200_000.0, "2.315 d"),
        (NUMBER, 123_456.0, "123456"),
        (NUMBER, 0.00123456, "0.001235"),
        (NUMBER, 1e-5, "10⁻⁵"),
        (NUMBER, -2.5e7, "-2.5·10⁷"),
    ],
)
def test_text_of_a_value(quantity: Quantity, number: float, text: str) -> None:
    assert quantity.text(number) == text


@pytest.mark.parametrize(
    ("quantity", "mean", "spread", "text"),
    [
        (FRACTION, 0.97254, 0.0031, "97.25 ± 0.31 %"),
        (FRACTION, 0.95, 0.0, "95.00 ± 0.00 %"),
        (BYTES, 38400.0, 0.0, "37.5 KiB"),
        (BYTES, 38400.0, 512.0, "37.5 ± 0.5 KiB"),
        (NUMBER, 210.0, 12.4, "210 ± 12"),
        (NUMBER, 0.0206, 0.00103, "0.0206 ± 0.0010"),
        (NUMBER, 0.0, 0.5, "0.0 ± 0.5"),
        (NUMBER, 2e-7, 3e-8, "(2.0 ± 0.3)·10⁻⁷"),
    ],
)
def test_text_of_a_mean_with_its_spread(quantity: Quantity, mean: float, spread: float | None, text: str) -> None:
    assert quantity.value_text(Value(mean=mean, spread=spread, count=3)) == text


def test_scale_of_equal_values_has_room_on_both_sides() -> None:
    for number in (0.0, 0.5, -3.0):
        scale = Scale.over([number, number], NUMBER, may_be_log=True)
        assert scale.low <= number < scale.high


@pytest.mark.parametrize(("low", "is_log"), [(1.0, True), (101.0, False), (-2.0, False)])
@pytest.mark.parametrize("odd", [1e6, -1e6])
def test_one_outlier_does_not_change_an_axis(low: float, is_log: bool, odd: float) -> None:
    extents = [Extent(low + end, (), is_compared=True) for end in (0.0, 2.0, 3.0, 4.0, 5.0, 20.0 if is_log else 6.0)]
    alone = Scale.without_outliers(extents, NUMBER, may_be_log=is_log)
    assert alone.is_log == is_log
    assert Scale.without_outliers([*extents, Extent(odd, (odd,), is_compared=True)], NUMBER, may_be_log=is_log) == alone
    # Nor do a point of a curve, a spread and a baseline.
    first, *others = extents
    point = [Extent(first.end, (*(extent.end for extent in others), odd), is_compared=True), *others]
    assert Scale.without_outliers(point, NUMBER, may_be_log=is_log) == alone
    whisker = [Extent(first.end, (), is_compared=True, whiskers=(first.end - odd, first.end + odd)), *others]
    assert Scale.without_outliers(whisker, NUMBER, may_be_log=is_log) == alone
    baseline = Extent(odd, (odd,), is_compared=False)
    assert Scale.without_outliers([*extents, baseline], NUMBER, may_be_log=is_log) == alone


@pytest.mark.parametrize("distance", [0.9, 1.1])
def test_what_is_no_farther_than_the_axis_is_long_is_taken_in(distance: float) -> None:
    inner = [Extent(0.5 + end / 100, (), is_compared=True) for end in range(5)]
    scale = Scale.without_outliers(inner, FRACTION, may_be_log=False)
    place = scale.high + distance * (scale.high - scale.low)
    for other in (Extent(place, (), is_compared=False), Extent(0.5, (), is_compared=True, whiskers=(0.5, place))):
        assert Scale.without_outliers([*inner, other], FRACTION, may_be_log=False).reaches(place) == (distance < 1)


def test_styles_of_many_series_differ() -> None:
    many = NUM_COLOURS * len(SHAPES) * len(DASHES)
    assert len({Style.numbered(number) for number in range(many)}) == many


def test_panels_divide_by_ranks_and_partition_and_keep_names_and_styles() -> None:
    divided = panels(read_document(comparison()).rows)
    assert [panel.title for panel in divided] == ["16 ranks", "25 ranks", "64 ranks"]
    looks = [[(series.name, series.style) for series in panel.series] for panel in divided]
    assert looks[0] == looks[1] == looks[2]
    assert len({style for _, style in looks[0]}) == 12


def test_crowded_panels_divide_further_with_the_baselines_in_each() -> None:
    algorithms = ("adapt_while_communicating", "gradient_tracking")
    more = [row(label, world_size=n, algorithm=each) for n in (16, 64) for each in algorithms for label in TOPOLOGIES]
    baselines = [row("all-reduce", world_size=n) for n in (16, 64)]
    divided = panels(read_document(document([*more, *baselines])).rows)
    assert [panel.title for panel in divided] == [
        f"{n} ranks, {algorithm}" for n in (16, 64) for algorithm in ("adapt while communicating", "gradient tracking")
    ]
    assert all([series.name for series in panel.series] == [*TOPOLOGIES, "all-reduce"] for panel in divided)


def test_baselines_without_compression_stand_beside_rows_with_it() -> None:
    gossip = [row(label, compression=each) for each in ("none", "int8") for label in [*TOPOLOGIES] * 2]
    rows = read_document(document([*gossip, row("all-reduce"), row("no communication")])).rows
    assert [(panel.title, len(panel.series)) for panel in panels(rows)] == [
        ("compression none", 22),
        ("compression int8", 22),
    ]


def test_best_is_marked_among_rows_that_can_be_compared() -> None:
    read = read_document(comparison())
    by_name = {column.name: column for column in columns(read)}
    sent = best(read.rows, by_name["bytes_per_step"])
    assert {(read.rows[index].label, read.rows[index].world_size) for index in sent} == {
        (label, n) for n in (16, 25, 64) for label in ("one_peer_exponential", "random_matching")
    }
    consensus = best(read.rows, by_name["consensus_distance_relative"])
    assert {read.rows[index].label for index in consensus} == {"complete"}
    assert best(read.rows, by_name["training_time_s"]) == set()
    equal = read_document(document([row("ring"), row("torus", values=row("ring")["values"]), failed_row("grid")]))
    assert best(equal.rows, by_name["averaged_accuracy"]) == set()


def test_columns_begin_with_the_metric_and_leave_out_what_nobody_has() -> None:
    values = {"averaged_accuracy": value(0.5), "averaged_loss": value(1.0), "steps": value(10), "own": value(3.0)}
    rows = [row("ring", values=values), row("torus", values={**values, "steps": value(12)})]
    metric = {"name": "loss", "higher_is_better": False, "target": None}
    read = read_document(document(rows, metric=metric))
    assert [column.name for column in columns(read)] == [
        "averaged_loss", "averaged_accuracy", "steps", "own",
    ]  # fmt: skip
    same = read_document(document(rows[:1]))
    assert "steps" not in [column.name for column in columns(same)]


@pytest.mark.parametrize(("accuracy", "is_beyond"), [(0.2, True), (0.96, False)])
def test_a_baseline_far_away_does_not_squeeze_the_others(accuracy: float, is_beyond: bool, tmp_path: Path) -> None:
    alone = row("no communication", curves=None)
    alone["values"]["averaged_accuracy"] = value(accuracy)
    whole = document([row("ring"), row("torus"), alone])
    read = read_document(whole)
    scales = charts(read)[0].scales(read.rows)
    assert scales is not None
    assert scales[0].low > 0  # what sends nothing is a level, not a place on the axis
    assert scales[1].reaches(accuracy) != is_beyond
    write_report(whole, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert ("Beyond this axis: no communication: 20.00 % at 0 B" in page) == is_beyond


def test_the_specification_has_the_axes_in_units_and_every_name() -> None:
    read = read_document(comparison())
    divided = panels(read.rows)
    chart = charts(read)[0]
    scales = chart.scales(read.rows)
    assert scales is not None
    spec = make_spec(chart, divided, *scales)
    x, y = spec["encoding"]["x"], spec["encoding"]["y"]
    assert (x["axis"]["title"], y["axis"]["title"]) == ("sent per rank, MiB", "accuracy of the averaged model, %")
    assert (x["scale"]["type"], x["scale"]["domain"][0]) == ("log", scales[0].low / 2**20)
    assert 90 < y["scale"]["domain"][0] < 96 < y["scale"]["domain"][1] <= 100
    assert spec["encoding"]["color"]["scale"]["domain"] == ["all-reduce", "no communication", *TOPOLOGIES]
    ends = {end["name"]: end for end in make_ends(chart, divided[0].series, *scales)}
    assert ends["no communication"]["is_level"]
    ring = row("ring")
    assert ends["ring"]["x"] == ring["curves"]["bytes"][-1] / 2**20
    assert ends["ring"]["high"] - ends["ring"]["low"] == pytest.approx(0.42)


def test_an_end_at_zero_has_no_place_on_a_logarithmic_axis() -> None:
    read = read_document(comparison())
    chart = charts(read)[2]
    scales = chart.scales(read.rows)
    assert scales is not None
    assert scales[1].is_log
    ends = {end["name"]: end for end in make_ends(chart, panels(read.rows)[0].series, *scales)}
    assert ends["all-reduce"]["y"] is None
    assert ends["all-reduce"]["words"] == "all-reduce: 0 at 440 steps"
    assert ends["ring"]["y"] > 0


def test_the_absolute_distance_is_drawn_beside_the_relative_one_if_it_is_known() -> None:
    older = row("ring")
    del older["curves"]["consensus_absolute"]
    for known, is_drawn in ((row("ring"), True), (older, False)):
        read = read_document(document([known]))
        drawn = [chart.identifier for chart in charts(read) if chart.scales(read.rows) is not None]
        assert drawn == ["bytes", "time", "consensus", *["consensus_absolute"] * is_drawn]


def test_end_of_a_row_without_curves_comes_from_its_values() -> None:
    read = read_document(document([row("ring", curves=None)]))
    ends = {chart.identifier: chart.end(read.rows[0]) for chart in charts(read)}
    values = read.rows[0].values
    assert ends["bytes"] == (75_000.0 * 440, values["averaged_accuracy"].mean, 0.0021)  # type: ignore[union-attr]
    assert ends["time"] is not None
    assert ends["consensus"] is None
