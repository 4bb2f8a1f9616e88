"""What the page's charts and table make of numbers."""

from pathlib import Path

import pytest
from report_documents import TOPOLOGIES, comparison, document, failed_row, read, row, value, write

from gossip.lab.report.chart_specs import make_ends, make_spec
from gossip.lab.report.charts import charts, panels
from gossip.lab.report.quantities import BYTES, FRACTION, NUMBER, SECONDS, Quantity, Scale
from gossip.lab.report.report_document import Value
from gossip.lab.report.report_page import best, columns


@pytest.mark.parametrize(
    ("quantity", "mean", "spread", "text"),
    [
        (FRACTION, 0.97254, None, "97.25 %"),
        (BYTES, 0.0, None, "0 B"),
        (BYTES, 38400.0, None, "37.5 KiB"),
        (SECONDS, 0.0123, None, "12.3 ms"),
        (SECONDS, 90.0, None, "1.5 min"),
        (SECONDS, 200_000.0, None, "2.315 d"),
        (NUMBER, 123_456.0, None, "123456"),
        (NUMBER, 0.00123456, None, "0.001235"),
        (NUMBER, -2.5e7, None, "-2.5e+07"),
        (FRACTION, 0.97254, 0.0031, "97.25 ± 0.31 %"),
        (FRACTION, 0.95, 0.0, "95.00 ± 0.00 %"),
        (BYTES, 38400.0, 512.0, "37.5 ± 0.5 KiB"),
        (NUMBER, 210.0, 12.4, "210 ± 12"),
        (NUMBER, 0.0206, 0.00103, "0.0206 ± 0.0010"),
        (NUMBER, 0.0, 0.5, "0.0 ± 0.5"),
        (NUMBER, 2e-7, 3e-8, "2e-07 ± 3e-08"),
    ],
)
def test_text_of_a_value(quantity: Quantity, mean: float, spread: float | None, text: str) -> None:
    assert quantity.value_text(Value(mean=mean, spread=spread, count=3)) == text


@pytest.mark.parametrize("odd", [1e6, 1e-6, 0.0])
def test_one_outlier_does_not_change_an_axis_but_a_baseline_is_inside(odd: float) -> None:
    values = [1.0, 3.0, 4.0, 5.0, 6.0, 21.0]
    alone = Scale.over(values, [], NUMBER, may_be_log=True)
    assert alone.is_log
    assert alone.low < min(values) < max(values) < alone.high
    assert Scale.over([*values, odd], [], NUMBER, may_be_log=True) == alone
    assert alone.low <= alone.place(odd) <= alone.high  # at the edge
    # What is next to nothing has no place among values that are told apart by decades.
    assert Scale.over(values, [odd], NUMBER, may_be_log=True).reaches(odd) == (odd > 1)
    assert Scale.over(values, [odd], NUMBER, may_be_log=False).reaches(odd)
    # Where a line ends there, the axis is broken.
    broken = Scale.over(values, [], NUMBER, may_be_log=True, ends=[*values, odd])
    assert broken == alone if odd > 1 else broken.low < broken.place(odd) < alone.low == broken.break_at


def test_accuracies_far_apart_are_told_apart_by_their_errors() -> None:
    scale = Scale.over([0.96, 0.97], [0.2], FRACTION, may_be_log=True)
    assert scale.is_from_best
    assert (scale.place(0.97), scale.place(0.96)) == (pytest.approx(3), pytest.approx(4))
    assert scale.reaches(0.2)
    assert not Scale.over([0.86, 0.87], [0.2], FRACTION, may_be_log=True).is_log


def test_panels_divide_by_ranks_and_partition_and_keep_names_and_styles() -> None:
    divided = panels(read(comparison()).rows)
    assert [panel.title for panel in divided] == ["16 ranks", "25 ranks", "64 ranks"]
    looks = [[(series.name, series.style) for series in panel.series] for panel in divided]
    assert looks[0] == looks[1] == looks[2]
    assert len({style for _, style in looks[0]}) == 12


def test_best_is_marked_among_rows_that_can_be_compared() -> None:
    whole = read(comparison())
    by_name = {column.name: column for column in columns(whole)}
    sent = best(whole.rows, by_name["bytes_per_step"])
    assert {(whole.rows[index].label, whole.rows[index].world_size) for index in sent} == {
        (label, n) for n in (16, 25, 64) for label in ("one_peer_exponential", "random_matching")
    }
    consensus = best(whole.rows, by_name["consensus_distance_relative"])
    assert {whole.rows[index].label for index in consensus} == {"complete"}
    assert best(whole.rows, by_name["training_time_s"]) == set()
    equal = read(document([row("ring"), row("torus", values=row("ring")["values"]), failed_row("grid")]))
    assert best(equal.rows, by_name["averaged_accuracy"]) == set()


@pytest.mark.parametrize("accuracy", [0.1, 0.2, 0.96, 0.9999])
def test_baselines_and_target_are_inside_every_chart(accuracy: float) -> None:
    rows = [row("ring"), row("torus"), row("exponential"), row("star"), row("all-reduce"), row("no communication")]
    for each in rows[-2:]:
        each["values"]["averaged_accuracy"] = value(accuracy)
        each["values"]["averaged_loss"] = value(300.0)
        each["curves"]["time_s"] = [100 * time_s for time_s in each["curves"]["time_s"]]
    whole = read(document(rows))
    for chart in charts(whole):
        scales = chart.scales(whole.rows)
        assert scales is not None
        ends = [chart.end(each) for each in whole.rows[-2:]]
        assert all(end is not None and end.is_within(*scales) for end in ends), chart.identifier
        assert chart.target is None or scales[1].reaches(chart.target)


def test_what_lies_beyond_the_axis_is_named(tmp_path: Path) -> None:
    apart = row("star")
    apart["curves"]["consensus"] = [None] * 44 + [1e9]
    write(document([row("ring"), row("torus"), row("grid"), apart]), tmp_path)
    assert "At the edge, because they lie beyond: star: 1e+09 at 440 steps." in (tmp_path / "report.html").read_text()


def test_the_specification_has_the_axes_in_units_and_every_name() -> None:
    whole = read(comparison())
    divided = panels(whole.rows)
    chart = charts(whole)[1]
    scales = chart.scales(whole.rows)
    assert scales is not None
    spec = make_spec(chart, [series for panel in divided for series in panel.series], *scales)
    x, y = spec["encoding"]["x"], spec["encoding"]["y"]
    assert (x["axis"]["title"], y["axis"]["title"]) == ("sent per rank, MiB", "accuracy of the averaged model, %")
    assert (x["scale"]["type"], x["scale"]["domain"][0]) == ("log", scales[0].low / 2**20)
    assert y["scale"]["type"] == "log"
    assert y["scale"]["reverse"]
    assert 0 < y["scale"]["domain"][0] < 4 < 80 < y["scale"]["domain"][1]  # errors
    assert spec["encoding"]["color"]["scale"]["domain"] == ["all-reduce", "no communication", *TOPOLOGIES]
    ends = {end["name"]: end for end in make_ends(chart, divided[0].series, *scales)}
    assert ends["no communication"]["is_level"]
    ring = row("ring")
    assert ends["ring"]["x"] == ring["curves"]["bytes"][-1] / 2**20
    assert ends["ring"]["low"] - ends["ring"]["high"] == pytest.approx(0.42)


def test_the_absolute_distance_is_drawn_beside_the_relative_one_if_it_is_known() -> None:
    older = row("ring")
    del older["curves"]["consensus_absolute"]
    for known, is_drawn in ((row("ring"), True), (older, False)):
        whole = read(document([known]))
        drawn = [chart.identifier for chart in charts(whole) if chart.scales(whole.rows) is not None]
        results = ["time", "bytes", "steps", "loss_time", "loss_bytes", "loss_steps"]
        assert drawn == [*results, "consensus", *["consensus_absolute"] * is_drawn]
