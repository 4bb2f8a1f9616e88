"""Rows, ratios and tables of made-up records."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from bench_records import METHODS, records

from gossip.lab.benchmarks import bench_figures
from gossip.lab.benchmarks.bench_report import Spread, ratios_of, reference_of, rows_of
from gossip.lab.benchmarks.bench_tables import Result, cost_table, markdown

ROWS = rows_of(records(), METHODS, 1e5)
BY_LABEL = {row.label: row for row in ROWS}
RESULT = Result("200mbit", 1e5, ROWS, ratios_of(ROWS))


def test_report_row_of_a_method() -> None:
    row = BY_LABEL["gossip"]
    assert dataclasses.astuple(row.step_s) == pytest.approx((0.3, 0.2, 0.4))
    assert row.step_s_by_repetition == pytest.approx((0.2, 0.4))
    assert row.compute_s == pytest.approx(0.15)
    assert row.exposed_s == pytest.approx(0.15)
    assert row.reported_wait_s == pytest.approx(0.005)
    assert (row.sent_bytes, row.received_bytes) == (8500, 8000)
    assert row.peak_memory_bytes == 2500
    assert row.final_loss == 0.5


def test_report_whole_time_is_from_the_last_start_to_the_last_end() -> None:
    row = BY_LABEL["gossip"]
    assert row.whole_s_by_repetition == pytest.approx((0.2, 0.4 + 1.0 / 4))
    assert row.steps_per_s.high == pytest.approx(5)
    assert row.steps_per_s.low == pytest.approx(1 / 0.65)


def test_report_efficiency_is_of_what_holds_a_step_up() -> None:
    assert BY_LABEL["gossip"].efficiency == pytest.approx(0.15 / 0.3)  # compute: 8500 bytes take 0.085 s
    slow_links = {row.label: row for row in rows_of(records(), METHODS, 5e4)}
    assert slow_links["gossip"].efficiency == pytest.approx(0.17 / 0.3)
    assert all(row.efficiency is None for row in rows_of(records(), METHODS, None))


def test_report_without_local_knows_no_compute() -> None:
    rows = rows_of(records(), METHODS[1:], 1e5)
    assert {(row.compute_s, row.exposed_s, row.efficiency) for row in rows} == {(None, None, None)}


def test_report_reference_is_the_fastest_that_does_not_compress() -> None:
    reference = reference_of(ROWS, "ddp")
    assert reference is not None
    assert reference.label == "ddp 25 MiB"
    assert reference_of(ROWS, "decent_dp") is None


def test_report_ratios_are_of_pairs_of_the_same_repetition() -> None:
    ratios = {(ratio.label, ratio.reference): ratio for ratio in ratios_of(ROWS)}
    assert {reference for _, reference in ratios} == {"ddp 25 MiB", "local"}
    ratio = ratios["gossip", "ddp 25 MiB"]
    assert dataclasses.astuple(ratio.step) == pytest.approx((0.5, 0.5, 0.5))
    assert ratio.throughput.high == pytest.approx(2.0)
    assert ratio.throughput.low == pytest.approx(0.8 / 0.65)
    assert ("local", "local") not in ratios


def test_report_spread_of_one_value() -> None:
    assert Spread.quartiles([3.0]) == Spread.over([3.0]) == Spread(3.0, 3.0, 3.0)


def test_report_markdown_has_every_method_and_reference() -> None:
    text = markdown("Benchmark", ["a fact"], [RESULT])
    lines = text.splitlines()
    assert "- a fact" in lines
    assert "## Links of 200mbit" in lines
    for method in METHODS:
        assert sum(line.startswith(f"| {method.label} |") for line in lines) == 2
    assert "step to ddp 25 MiB" in text
    assert "| gossip | 300.0 | 200.0 to 400.0 |" in text


def test_report_a_loss_that_is_not_finite_is_said() -> None:
    assert "not finite" in cost_table([dataclasses.replace(ROWS[0], final_loss=None)])


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_report_figures_are_the_same_every_time(suffix: str, tmp_path: Path) -> None:
    other = dataclasses.replace(RESULT, rate="1gbit")
    for number in (0, 1):
        bench_figures.parts_figure([RESULT, other], tmp_path / f"parts{number}.{suffix}")
        bench_figures.rates_figure([RESULT, other], tmp_path / f"rates{number}.{suffix}")
    for name in ("parts", "rates"):
        first, second = ((tmp_path / f"{name}{number}.{suffix}").read_bytes() for number in (0, 1))
        assert first == second
        assert len(first) > 5000
