"""Rows, ratios and tables of made-up records."""

from typing import Any

import pytest

from gossip.lab.benchmarks.bench_methods import MethodSpecification
from gossip.lab.benchmarks.benchmark import Spread
from gossip.lab.benchmarks.step_time import Row, StepTimeResult, ratios_of, references_of, result_of, section

METHODS = [
    MethodSpecification(label=label, kind=label.split()[0], options=options)
    for label, options in {
        "local": {},
        "ddp 1 MiB": {"bucket_cap_mb": 1},
        "ddp 25 MiB": {"bucket_cap_mb": 25},
        "ddp bf16": {"hook": "bf16"},
        "gossip": {"topology": "ring"},
    }.items()
]
STEP_S = {"local": 0.1, "ddp 1 MiB": 0.5, "ddp 25 MiB": 0.4, "ddp bf16": 0.3, "gossip": 0.2}
NUM_STEPS = 4


def record(label: str, rank: int, repetition: int) -> dict[str, Any]:
    """Rank 1 starts 1 s after rank 0; the second repetition's steps take twice as long; gossip's are 1 s late there."""
    step_s = STEP_S[label] * (1 + repetition)
    start_s = 100.0 + rank
    late_s = 1.0 if (label, repetition) == ("gossip", 1) else 0.0
    return {
        "method": label,
        "repetition": repetition,
        "start_s": start_s,
        "end_s": start_s + NUM_STEPS * step_s + late_s,
        "step_s": [step_s] * NUM_STEPS,
        "sent_bytes": NUM_STEPS * (8_000 + 1_000 * rank),
        "peak_memory_bytes": 1_000 * (1 + rank + repetition),
        "final_loss": 0.5 if repetition == 0 else None,
    }


def result(goodput: float | None = 1e5, methods: list[MethodSpecification] = METHODS) -> StepTimeResult:
    """Of two ranks; records are in alternating order, after the record of the goodput."""
    by_rank = []
    for rank in range(2):
        found: list[dict[str, Any]] = [{"goodput_bytes_per_s": goodput}]
        for repetition in range(2):
            found += [record(method.label, rank, repetition) for method in METHODS[:: -1 if repetition else 1]]
        by_rank.append(found)
    return result_of("200mbit", methods, by_rank)


def rows(**options: Any) -> dict[str, Row]:
    return {row.label: row for row in result(**options).rows}


def values(spread: Spread) -> tuple[float, float, float]:
    return spread.median, spread.low, spread.high


def test_report_row_of_a_method() -> None:
    row = rows()["gossip"]
    assert values(row.step_s) == pytest.approx((0.3, 0.2, 0.4))
    assert row.step_s_by_repetition == pytest.approx((0.2, 0.4))
    assert (row.compute_s, row.exposed_s) == pytest.approx((0.15, 0.15))
    assert row.sent_bytes == 8500
    assert row.peak_memory_bytes == 2500
    assert row.final_loss == 0.5
    # From the last start to the last end.
    assert row.whole_s_by_repetition == pytest.approx((0.2, 0.4 + 1.0 / 4))
    assert (row.steps_per_s.high, row.steps_per_s.low) == pytest.approx((5, 1 / 0.65))


def test_report_efficiency_is_of_what_holds_a_step_up() -> None:
    assert rows()["gossip"].efficiency == pytest.approx(0.15 / 0.3)  # compute: 8500 bytes take 0.085 s
    assert rows(goodput=5e4)["gossip"].efficiency == pytest.approx(0.17 / 0.3)
    assert all(row.efficiency is None for row in rows(goodput=None).values())


def test_report_ratios_are_to_the_fastest_that_does_not_compress_in_the_same_repetition() -> None:
    ddp, local = references_of(result().rows)
    assert (ddp.label, local.label) == ("ddp 25 MiB", "local")
    step, throughput = ratios_of(rows()["gossip"], ddp)
    assert values(step) == pytest.approx((0.5, 0.5, 0.5))
    assert (throughput.high, throughput.low) == pytest.approx((2.0, 0.8 / 0.65))


def test_report_has_every_method_and_reference() -> None:
    heading, carried, costs, ratios, *_ = section(result())
    assert heading == "## Links of 200mbit"
    assert carried == "Goodput: 0.1 MB/s (0.8 Mbit/s) per rank, each way at once."
    for method in METHODS:
        assert all(f"\n| {method.label} |" in text for text in (costs, ratios))
    assert ratios.startswith(
        "| method | step to ddp 25 MiB | throughput to ddp 25 MiB | step to local | throughput to local |"
    )
    assert "\n| local | 0.250 | 4.000 | 1 | 1 |" in ratios
    assert "| gossip | 300.0 | 200.0 to 400.0 |" in costs
    lost = result().model_copy(update={"rows": [rows()["local"].model_copy(update={"final_loss": None})]})
    assert "not finite" in section(lost)[2]
