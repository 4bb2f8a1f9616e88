"""Result documents of sweeps that were never run: plausible numbers by formulas."""

import json
import math
from pathlib import Path
from typing import Any

from gossip.lab.report.report_document import Document
from gossip.lab.report.report_page import write_report

TOPOLOGIES = {
    # messages sent per step; how fast disagreements shrink with 16 ranks, and with what power of their number
    "one_peer_exponential": (1.0, 0.25, 0.2),
    "exponential": (5.0, 0.9, 0.0),
    "ring": (2.0, 0.05, 2.0),
    "torus": (4.0, 0.13, 1.0),
    "grid": (3.5, 0.08, 1.0),
    "hypercube": (5.0, 0.6, 0.1),
    "complete": (1.9, 1.0, 0.0),
    "star": (1.9, 0.06, 1.0),
    "random_matching": (1.0, 0.4, 0.0),
    "random_regular(degree=3)": (3.0, 0.5, 0.1),
}
_BASELINES = {"all-reduce": (1.9, 1.0, 0.0), "no communication": (0.0, 0.0, 0.0)}
MODEL_BYTES = 37_500.0
STEPS = tuple(range(0, 441, 10))


def value(mean: float | None, spread: float | None = None, count: int = 3) -> dict[str, Any] | None:
    return None if mean is None else {"mean": mean, "spread": spread, "count": count}


def row(label: str, **changes: Any) -> dict[str, Any]:
    """A row that completed, with curves."""
    method = {"all-reduce": "ddp", "no communication": "local"}.get(label, "gossip")
    is_gossip = method == "gossip"
    n = changes.get("world_size", 16)
    messages, gap, power = {**TOPOLOGIES, **_BASELINES}[label]
    gap *= (16 / n) ** power
    difficulty = {"iid": 1.0, "dirichlet(0.1)": 3.0, "by_class(2)": 4.5}[changes.get("partition", "iid")]
    if changes.get("algorithm") == "gradient_tracking":
        difficulty **= 0.5
        messages *= 2
    final = 0.978 - 0.012 * difficulty * (1 - gap) - 0.0002 * n
    step_time_s = 0.004 + 0.0009 * messages + (0.002 * math.log2(n) if method == "ddp" else 0.0)
    accuracy = [0.1 + (final - 0.1) * (1 - math.exp(-step / 50)) for step in STEPS]
    distances = [0.2 * difficulty * (1 - gap) * (0.05 + math.exp(-step / 150)) if step else 0.0 for step in STEPS]
    is_compressed = changes.get("compression") == "int8"
    sent = messages * MODEL_BYTES * (0.27 if is_compressed else 1.0)
    reached = next((step for step, reached in zip(STEPS, accuracy, strict=True) if reached >= 0.96), None)
    seeds = [0, 1, 2]
    return {
        "label": label,
        "method": method,
        "topology": label.partition("(")[0] if is_gossip else None,
        "world_size": n,
        "partition": "iid",
        "algorithm": "adapt_while_communicating" if is_gossip else None,
        "compression": None if method == "local" else "none",
        "engine": "virtual",
        "seeds": seeds,
        "num_failed": 0,
        "status": "completed",
        "reasons": [],
        "commands": [f"gossip train topology={label} launch.world_size={n} seed={seed}" for seed in seeds],
        "values": {
            "averaged_accuracy": value(final, 0.0021),
            "averaged_loss": value(0.08 + 0.1 * (1 - gap), 0.004),
            "local_accuracy_mean": value(final - 0.01 * (1 - gap), 0.002),
            "local_accuracy_worst": value(final - 0.03 * (1 - gap), 0.004),
            "consensus_distance_relative": value(distances[-1], distances[-1] / 20),
            "bytes_per_step": value(sent, 0.0),
            "steps": value(STEPS[-1], 0.0),
            "rounds_to_target": value(reached, 8.0),
            "bytes_to_target": value(None if reached is None else reached * sent, 0.0),
            "predicted_step_time_s": value(step_time_s, 0.0),
            "predicted_time_to_target_s": value(None if reached is None else reached * step_time_s, 0.01),
            "predicted_total_time_s": value(STEPS[-1] * step_time_s, 0.0),
            "training_time_s": value(3.2 + n / 8, 0.11),
        },
        "curves": {
            "step": list(STEPS),
            "bytes": [step * sent for step in STEPS],
            "time_s": [step * step_time_s for step in STEPS],
            "metric": accuracy,
            "metric_low": [value - 0.003 for value in accuracy],
            "metric_high": [value + 0.002 for value in accuracy],
            "loss": [2.3 - 2.2 * value for value in accuracy],
            "consensus": distances,
            "consensus_absolute": [12.0 * distance for distance in distances],
        },
        **changes,
    }


def failed_row(label: str, **changes: Any) -> dict[str, Any]:
    failed = {
        "num_failed": 3,
        "status": "failed",
        "reasons": [
            f"seed {seed}: RuntimeError: rank 3 ended at step 12 of 440: loss is not finite" for seed in range(3)
        ],
        "values": {},
        "curves": None,
    }
    return row(label, **{**failed, **changes})


def document(rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "title": "topology_comparison",
        "description": "Ten topologies against all-reduce and no communication on digits, at three numbers of ranks.",
        "settings": {"model": "MLP(hidden=[128])", "data": "digits", "optimizer": "SGD(lr=0.1, momentum=0.9)"},
        "metric": {"name": "accuracy", "higher_is_better": True, "target": 0.96},
        "cluster": {
            "num_nodes": 4,
            "local_size": 4,
            "latency_us": 50.0,
            "bandwidth_gbps": 10.0,
            "description": "4 nodes of 4 ranks, 10 Gbit/s and 50 µs between nodes",
        },
        "environment": {"python": "3.11.7", "torch": "2.13.0", "gossip-training": "0.1.0"},
        "rows": rows,
        **changes,
    }


def read(whole: dict[str, Any]) -> Document:
    return Document.model_validate_json(json.dumps(whole))


def write(whole: dict[str, Any], folder: Path) -> None:
    write_report(read(whole), folder)


def comparison(world_sizes: tuple[int, ...] = (16, 25, 64), **changes: Any) -> dict[str, Any]:
    """All topologies and both baselines at some numbers of ranks."""
    labels = ("all-reduce", "no communication", *TOPOLOGIES)
    return document([row(label, world_size=n) for n in world_sizes for label in labels], **changes)


def heterogeneity() -> dict[str, Any]:
    """Few topologies on several partitions, with two algorithms and compression."""
    rows = []
    for partition in ("iid", "dirichlet(0.1)", "by_class(2)"):
        rows += [row(label, partition=partition) for label in ("all-reduce", "no communication")]
        for label in ("ring", "one_peer_exponential", "complete"):
            for algorithm in ("adapt_while_communicating", "gradient_tracking"):
                rows += [
                    row(label, partition=partition, algorithm=algorithm, compression=compression)
                    for compression in ("none", "int8")
                ]
    return document(rows, title="heterogeneity", description="What skewed data costs each algorithm.")
