"""The summary of a run: one small dictionary."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip.lab.experiments.evaluation import Evaluation
from gossip.lab.experiments.experiment_build import Experiment
from gossip.lab.experiments.records import TOGETHER_FILE

_SUMMED = ("exposed_wait_s", "overlapped_s", "forward_s", "backward_s", "update_s", "bytes_sent", "num_refused")
_TOTALS = {"step_time_s": "training_time_s", **{name: name for name in (*_SUMMED, "num_skipped", "evaluation_s")}}
"""The keys of a record that are summed over the steps, and the name of each sum."""
_PARTS_OF_A_STEP = ("forward_s", "backward_s", "update_s")


def step_costs(folder: Path, name: str, last: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums over the steps of a rank from its record file ``name``, which lacks the ``last`` record.

    A run that has gone on with the other engine has the records of its earlier steps in another file: in that for all
    ranks, or in those of the ranks, of which the first counts.
    """
    sums: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    other = "rank0.jsonl" if name == TOGETHER_FILE else TOGETHER_FILE
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in (folder / other, folder / name) if path.exists()]
        for record in itertools.chain(map(json.loads, itertools.chain(*files)), [last]):
            sums.update({"steps": 1} | {sum_: record[key] for key, sum_ in _TOTALS.items() if key in record})
            waits.update(record.get("wait_by_peer_s", {}))
    return {**sums, "wait_by_peer_s": dict(waits)}


def summarise(
    experiment: Experiment,
    reports: Sequence[Mapping[str, Any]],
    average: Evaluation,
    consensus_before: tuple[float, float],
    consensus_after: tuple[float, float],
    parameter_bytes: int,
    changes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Build the summary of a completed run.

    ``reports`` are the :func:`step_costs` of each rank with the evaluation of its replica, and ``average`` evaluates
    their average. The absolute and the relative consensus distance are those before and after that replaced the
    replicas. The changes of membership have the step from which each applies, and the members from then on.
    """
    settings = experiment.settings
    accuracies = [report["test_accuracy"] for report in reports]
    losses = [report["test_loss"] for report in reports]
    steps, options = reports[0]["steps"], experiment.wrapper_options
    waits = [report["wait_by_peer_s"] for report in reports]  # of the ranks that receive messages from a peer
    norm, which = options["clip_grad_norm"], "global" if settings.method == "ddp" else options["clip"]
    return {
        "status": "completed",
        "reason": "",
        "method": settings.method,
        "engine": settings.engine,
        "topology": experiment.topology.name if experiment.topology is not None else None,
        "algorithm": None if settings.method == "ddp" else experiment.algorithm.describe(),
        "compression": None if settings.method == "ddp" else experiment.compression.describe(),
        "clipping": None if norm is None else f"{norm:g} ({which})",
        "data": experiment.data.name,
        "data_notes": experiment.data.notes,
        "seed": settings.seed,
        "world_size": settings.launch.world_size,
        "local_size": settings.launch.local_size,
        "shard": settings.shard if settings.launch.local_size > 1 else None,
        "local_test_accuracy_mean": statistics.fmean(accuracies),
        "local_test_accuracy_worst": min(accuracies),
        "local_test_accuracy_best": max(accuracies),
        "local_test_loss_mean": statistics.fmean(losses),
        "local_test_loss_worst": max(losses, key=lambda loss: (math.isnan(loss), loss)),
        "averaged_test_accuracy": average.accuracy,
        "averaged_test_loss": average.loss,
        "consensus_distance_before": consensus_before[0],
        "consensus_distance_before_relative": consensus_before[1],
        "consensus_distance_after": consensus_after[0],
        "consensus_distance_after_relative": consensus_after[1],
        "epochs": -(-experiment.total_steps // experiment.shards.steps_per_epoch),  # the last one may be incomplete
        "steps": steps,
        "training_time_s": max(report["training_time_s"] for report in reports),
        "evaluation_s": max(report["evaluation_s"] for report in reports),
        **{name: _mean(reports, name) for name in ("exposed_wait_s", "overlapped_s", *_PARTS_OF_A_STEP)},
        "wait_by_peer_s": {peer: _mean(waits, peer) for peer in sorted(set().union(*waits), key=int)},
        "parameter_bytes": parameter_bytes,
        "bytes_sent_per_step": statistics.fmean(report["bytes_sent"] / report["steps"] for report in reports),
        **{name: sum(report.get(name, 0) for report in reports) for name in ("num_refused", "num_skipped")},
        "changes_of_ranks": list(changes),
    }


def _mean(reports: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a cost over the ranks; None if the method does not measure it."""
    values = [report[name] for report in reports if name in report]
    return statistics.fmean(values) if values else None
