"""Made-up records of two ranks, with round numbers."""

from __future__ import annotations

from typing import Any

from gossip.lab.benchmarks.bench_report import Records
from gossip.lab.benchmarks.bench_specification import MethodSpecification

METHODS = (
    MethodSpecification("local", "local", {}),
    MethodSpecification("ddp 1 MiB", "ddp", {"bucket_cap_mb": 1}),
    MethodSpecification("ddp 25 MiB", "ddp", {"bucket_cap_mb": 25}),
    MethodSpecification("ddp bf16", "ddp", {"hook": "bf16"}),
    MethodSpecification("gossip", "gossip", {"topology": "ring"}),
)
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
        "exposed_wait_s": [None if "ddp" in label else 0.01 * rank] * NUM_STEPS,
        "sent_bytes": NUM_STEPS * (8_000 + 1_000 * rank),
        "received_bytes": NUM_STEPS * 8_000,
        "peak_memory_bytes": 1_000 * (1 + rank + repetition),
        "final_loss": 0.5 if repetition == 0 else None,
    }


def records() -> Records:
    """In alternating order, after the record of the goodput."""
    by_rank = []
    for rank in range(2):
        found: list[dict[str, Any]] = [{"goodput_bytes_per_s": 1e5}]
        for repetition in range(2):
            found += [record(method.label, rank, repetition) for method in METHODS[:: -1 if repetition else 1]]
        by_rank.append(found)
    return by_rank
