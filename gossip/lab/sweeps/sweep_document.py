"""The result document of a sweep: common settings, and rows with curves and values of runs that differ in their seed.

The seeds of a row are aggregated, as mean and spread, and each run is compared with the all-reduce run of its seed. The
time of a step is predicted for the cluster that the configuration describes.
"""

import math
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

import gossip
from gossip.lab.experiments import run_folder
from gossip.lab.experiments.experiment_build import make_algorithm, make_topology
from gossip.lab.experiments.records import leaves, read_jsonl, record_files
from gossip.lab.experiments.run_settings import Settings, wrapper_options
from gossip.lab.experiments.targets import TARGET
from gossip.lab.experiments.validated_models import ConfigurationError, Model, blaming, read, shown, value_of
from gossip.lab.report.report_document import FEWEST_SEEDS, Curves, Document, Metric, Row, Setting, Value
from gossip.lab.sweeps.sweep_jobs import REFERENCE, Job, Plan
from topologies import Topology
from topologies.matrix_storage import FloatArray

_MOST_NAMED = 4
_NUM_STEPS = 64
"""The least number of simulated steps; longer runs are assumed to go on like this."""

_FORWARD_SHARE = 1 / 3
"""The share of the forward pass in the computation of a step: a backward pass costs about two forward passes."""
_SHOWN = ("engine", "model", "data", "optimizer", "scheduler", "training")
"""The config sections of which a report says what all runs share."""
_IN_PLACE_OF = {"training.epochs": "training.steps", "training.batch_size": "training.total_batch_size"}
"""The options that mean nothing where another one has a value."""


Summary = Mapping[str, Any]
"""The summary of a run, as in ``summary.json``."""


def make_document(plan: Plan, folder: Path) -> Document:
    """Build the document of a report from the files of the runs, of which there is at least one."""
    config = plan.jobs[0].config
    metric = make_metric(config)
    return Document(
        title=_title(plan),
        description=" ".join([str(value_of(config, "sweep.description")), *(f"{line}." for line in plan.left_out)]),
        settings=_common_settings([job.config for job in plan.jobs]),
        metric=metric,
        cluster=_cluster(plan.jobs),
        environment=run_folder.versions(),
        rows=make_rows(plan.jobs, folder, metric),
    )


def _title(plan: Plan) -> str:
    """Return the name of the experiment in words or, without one, what is compared, where and on what."""
    if plan.experiment != "none":
        return plan.experiment.replace("_", " ").capitalize()
    settings = [job.setting for job in plan.jobs]
    compared = list(dict.fromkeys(setting.label for setting in settings if setting.method == "gossip"))
    few = _words(compared) if len(compared) <= _MOST_NAMED else f"{len(compared)} settings"
    sizes = sorted({setting.world_size for setting in settings})
    data = {str(job.config["data"]["_target_"]).rpartition(".")[2] for job in plan.jobs}
    where = [*sorted(data), *dict.fromkeys(setting.partition for setting in settings if setting.partition)]
    ranks = f"{_words(list(map(str, sizes)))} rank{'' if sizes == [1] else 's'}"
    return f"{few or 'All-reduce'} on {ranks}: {', '.join(where)}"


def _words(texts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def check_described(plan: Plan) -> None:
    """Raise ConfigurationError for a metric, target or cluster that would be read only after all runs."""
    make_metric(plan.jobs[0].config)
    for job in plan.jobs:
        make_cluster(job.config, job.setting.world_size)


def make_metric(config: Mapping[str, Any]) -> Metric:
    """Read the metric by which runs are compared; raises ConfigurationError if it or its target is none."""
    return read(Metric, value_of(config, "sweep"), "sweep")


def _common_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the options that all runs share, which the rows do not show, as they are written on the command line."""
    first, *others = (dict(leaves({part: config[part] for part in _SHOWN})) for config in configs)
    common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    return {
        key.removesuffix(f".{TARGET}"): shown(value).rpartition(".")[2] if key.endswith(TARGET) else shown(value)
        for key, value in common.items()
        if value is not None and not key.startswith("data.partition.") and first.get(_IN_PLACE_OF.get(key, "")) is None
    }


def _cluster(jobs: Sequence[Job]) -> dict[str, Any]:
    described = dict(jobs[0].config["cluster"])
    clusters = [make_cluster(job.config, job.setting.world_size) for job in jobs]
    sizes = sorted({cluster.num_nodes for cluster in clusters})
    ranks = "rank" if described["local_size"] == 1 else "ranks"
    return {
        **described,
        "num_nodes": sizes[0] if len(sizes) == 1 else None,
        "description": f"{', '.join(map(str, sizes))} nodes of {described['local_size']} {ranks}, links of "
        f"{clusters[0].bandwidth_text} Gb/s and {described['latency_us']:g} us; a rank computes "
        f"{described['compute_us_per_sample']:g} us per sample, more or less {described['jitter']:.0%}",
    }


Point = Mapping[str, Any]
"""A point of a curve: the "step" after which it was measured, the "bytes" sent per rank by then, mean over the ranks,
and the measurements of :data:`_MEASURED`, None where there is none or it is not finite."""

_MEASURED = {
    "accuracy": "averaged_test_accuracy",
    "loss": "averaged_test_loss",
    "consensus": "consensus_distance_relative",
    "consensus_absolute": "consensus_distance",
}
"""The measurements of a point, and their keys in a record."""


def read_curve(folder: Path) -> list[Point]:
    """Read the points of a run, in step order, from the records in its folder."""
    by_step = defaultdict[int, list[dict[str, Any]]](list)  # of the ranks that made it
    for path in record_files(folder):
        for record in read_jsonl(path):
            by_step[record["step"]].append(record)
    points: list[Point] = []
    sent = 0.0
    for step, records in sorted(by_step.items()):
        sent += statistics.fmean(record.get("bytes_sent", 0) for record in records)
        measured = {name: each[key] for each in reversed(records) for name, key in _MEASURED.items() if key in each}
        if "loss" in measured or "consensus" in measured:
            points.append({"step": step + 1, "bytes": sent, **dict.fromkeys(_MEASURED), **measured})
    return points


def steps_to_target(points: Sequence[Point], metric: Metric) -> Point | None:
    """Return the first measured point that reaches the target of the metric; None if there is none, or no target."""
    for point in points:
        value = point[metric.name]
        if value is None or metric.target is None:
            continue
        if value >= metric.target if metric.higher_is_better else value <= metric.target:
            return point
    return None


def mean_curve(curves: Sequence[Sequence[Point]], metric: Metric, step_time_s: float) -> Curves:
    """Average curves of runs, at least one, that differ in their seed.

    They are averaged at the steps that all of them have, and of several runs there are the lowest and the highest value
    too. A measurement that one run lacks is None: a mean over fewer runs would make the curve jump.
    """
    by_step = [{point["step"]: point for point in curve} for curve in curves]
    steps = sorted(set.intersection(*(set(points) for points in by_step)))
    ways: dict[str, Callable[[Sequence[float]], float]] = {"": statistics.fmean}
    if len(by_step) > 1:
        ways |= {"_low": min, "_high": max}
    found: dict[str, Any] = {"step": tuple(steps), "time_s": tuple(step * step_time_s for step in steps)}
    for key in ("bytes", *_MEASURED):
        points = [[of_run[step][key] for of_run in by_step] for step in steps]
        name = "metric" if key == metric.name else key
        for suffix, way in ways.items() if key != "bytes" else [("", statistics.fmean)]:
            found[f"{name}{suffix}"] = tuple(None if None in values else way(values) for values in points)
    return Curves(**found)


_FROM_SUMMARY = {
    "averaged_accuracy": "averaged_test_accuracy", "averaged_loss": "averaged_test_loss",
    "local_accuracy_mean": "local_test_accuracy_mean", "local_accuracy_worst": "local_test_accuracy_worst",
    "local_loss_mean": "local_test_loss_mean", "local_loss_worst": "local_test_loss_worst",
    "consensus_distance": "consensus_distance_before",
    "consensus_distance_relative": "consensus_distance_before_relative",
    "bytes_per_step": "bytes_sent_per_step", "steps": "steps", "training_time_s": "training_time_s",
}  # fmt: skip
"""The values of a row, and their keys in the summary of a run."""


def make_rows(jobs: Sequence[Job], folder: Path, metric: Metric) -> tuple[Row, ...]:
    """Build one row per setting, in order of appearance, from the files of the runs; its seeds are aggregated.

    Each run is compared with the all-reduce run of the same seed, ranks and data, if both have completed.
    """
    by_setting: dict[Setting, list[Job]] = {}
    for job in jobs:
        by_setting.setdefault(job.setting, []).append(job)
    summaries = {job.run.overrides: job.summary(folder) for job in jobs}
    return tuple(_row(of_setting, summaries, folder, metric) for of_setting in by_setting.values())


def _row(jobs: Sequence[Job], summaries: Mapping[tuple[str, ...], Summary], folder: Path, metric: Metric) -> Row:
    own = [(job, summaries[job.run.overrides]) for job in jobs]
    completed = [(job, summary) for job, summary in own if summary["status"] == "completed"]
    reasons = tuple(f"seed {job.seed}: {each['reason']}" for job, each in own if each["status"] != "completed")
    setting, values, curves = jobs[0].setting, dict[str, Value | None](), None
    if completed:
        step_time_s = predict_step_time_s(completed[0][0].config, completed[0][1])  # does not depend on the seed
        points = [read_curve(folder / job.name) for job, _ in completed]
        by_run = [_values(run[1], curve, metric, step_time_s) for run, curve in zip(completed, points, strict=True)]
        values = {name: aggregate([of_run[name] for of_run in by_run]) for name in by_run[0]}
        curves = mean_curve(points, metric, step_time_s)
        if setting.method != REFERENCE:
            pairs = [(summary, summaries.get(job.run.reference, {})) for job, summary in completed]
            values |= differences([pair for pair in pairs if pair[1].get("status") == "completed"], metric.name)
    return Row(
        **setting.model_dump(),
        seeds=tuple(job.seed for job in jobs),
        num_failed=len(reasons),
        status="completed" if not reasons else "partly failed" if completed else "failed",
        reasons=reasons,
        commands=tuple(f"gossip train {shlex.join(job.overrides)}" for job in jobs),
        values=values,
        tuning=jobs[0].choice,
        curves=curves,
    )


def _values(summary: Summary, curve: Sequence[Point], metric: Metric, step_time_s: float) -> dict[str, float | None]:
    """Return the values that one run contributes to its row."""
    reached = steps_to_target(curve, metric)
    return {
        **{name: summary.get(key) for name, key in _FROM_SUMMARY.items()},
        "rounds_to_target": None if reached is None else reached["step"],
        "bytes_to_target": None if reached is None else reached["bytes"],
        "predicted_step_time_s": step_time_s,
        "predicted_time_to_target_s": None if reached is None else reached["step"] * step_time_s,
        "predicted_total_time_s": summary["steps"] * step_time_s,
    }


def differences(pairs: Sequence[tuple[Summary, Summary]], metric: str) -> dict[str, Value | None]:
    """Compare a setting with the final model of all-reduce on the test split.

    The pairs are the summaries of completed runs: one of the setting, and one of all-reduce with the same seed, ranks
    and data. The result has ``loss_ratio`` of the averaged model and ``worst_loss_ratio`` of the worst local replica
    and, if the metric is accuracy, ``average_difference`` and ``worst_difference`` in percentage points, negative where
    all-reduce is more accurate. Each value has an interval, as of :func:`aggregate`.
    """
    compared = {"average_difference": "averaged_test_accuracy", "worst_difference": "local_test_accuracy_worst"}
    compared = compared if metric == "accuracy" else {}
    compared |= {"loss_ratio": "averaged_test_loss", "worst_loss_ratio": "local_test_loss_worst"}
    return {
        name: aggregate([_compared(key, run, other) for run, other in pairs], with_interval=True)
        for name, key in compared.items()
    }


def aggregate(values: Sequence[float | None], *, with_interval: bool = False) -> Value | None:
    """Return mean, sample standard deviation (None for one value) and count; None if a value is missing.

    A mean over only those seeds that reached the target would make a bad setting look good. The 95 % confidence
    interval is Student's t, mean ± t(0.975, n - 1) · spread / sqrt(n), and None for fewer than three values.
    """
    present = [value for value in values if value is not None]
    if not present or len(present) < len(values):
        return None
    mean, count = statistics.fmean(present), len(present)
    spread = statistics.stdev(present) if count > 1 else None
    if not with_interval or count < FEWEST_SEEDS or spread is None:
        return Value(mean=mean, spread=spread, count=count)
    from scipy.stats import t

    reach = float(t.ppf(0.975, count - 1)) * spread / math.sqrt(count)
    return Value(mean=mean, spread=spread, count=count, interval=(mean - reach, mean + reach))


def _compared(key: str, run: Summary, reference: Summary) -> float | None:
    is_loss = "loss" in key
    value: float | None = run[key]
    other: float | None = reference["averaged_test_loss" if is_loss else "averaged_test_accuracy"]
    if value is None or other is None or (is_loss and not other):
        return None
    return value / other if is_loss else 100 * (value - other)


class _Described(Model, extra="ignore"):
    """The keys of the section ``cluster`` that :class:`gossip.Cluster`, which checks the others, does not have."""

    local_size: int = Field(ge=1)
    compute_us_per_sample: float = Field(ge=0)
    jitter: float = Field(ge=0)


def make_cluster(config: Mapping[str, Any], world_size: int) -> gossip.Cluster:
    """Build the described cluster for a number of ranks.

    Raises ConfigurationError if the ranks do not fill whole nodes, or a value is out of range.
    """
    described = dict(value_of(config, "cluster"))
    read(_Described, described, "cluster")
    local_size = described.pop("local_size")
    del described["compute_us_per_sample"], described["jitter"]
    if world_size % local_size:
        raise ConfigurationError(
            f"launch.world_size={world_size} ranks do not fill nodes of cluster.local_size={local_size}; choose a "
            "multiple of it"
        )
    with blaming("cluster", described):
        return gossip.Cluster(world_size // local_size, local_size, **described)


def predict_step_time_s(config: Mapping[str, Any], summary: Summary) -> float:
    """Predict the mean time per step in seconds of a completed run, from its configuration and its summary."""
    settings = read(Settings, config)
    topology, algorithm = make_topology(config), make_algorithm(config)
    compute_s = 1e-6 * float(value_of(config, "cluster.compute_us_per_sample")) * settings.batch_size
    num_buckets = math.ceil(summary["parameter_bytes"] / (wrapper_options(config)["bucket_cap_mb"] * 2**20))
    workload = gossip.Workload(
        forward_s=_FORWARD_SHARE * compute_s,
        backward_s=(1 - _FORWARD_SHARE) * compute_s,
        bucket_bytes=(math.ceil(summary["parameter_bytes"] / num_buckets),) * num_buckets,
        jitter=float(value_of(config, "cluster.jitter")),
    )
    method: Topology | str = topology or {"ddp": "ddp", "local": "none"}[settings.method]
    num_steps, first, ratio = min(_NUM_STEPS, summary["steps"]), 0, 1.0
    if topology is not None:
        schedule = algorithm.schedule(topology)
        cycle, first = max(schedule.period or 1, getattr(algorithm, "period", 1)), schedule.warmup
        num_steps = min(summary["steps"], first + math.ceil(_NUM_STEPS / cycle) * cycle)
        is_plain = summary["compression"] == gossip.Uncompressed().describe() and algorithm.compression is None
        messages = np.zeros(num_steps)  # of the size of the model, per rank
        for step in range(0 if is_plain else num_steps):
            share = statistics.fmean(algorithm.is_exchanged(bucket, step) for bucket in range(num_buckets))
            num_edges = len(schedule.round(step).edges()[0]) if share else 0
            messages[step] = algorithm.messages_per_edge(step) * share * num_edges / topology.world_size
        expected = _mean(messages, first, summary["steps"]) * summary["parameter_bytes"]
        # By the bytes that were sent, so that it holds for any codec.
        ratio = expected / summary["bytes_sent_per_step"] if expected and summary["bytes_sent_per_step"] else 1.0
    cluster = make_cluster(config, settings.launch.world_size)
    run = gossip.simulate_time(method, cluster, workload, num_steps, algorithm=algorithm, compression_ratio=ratio)
    return _mean(np.diff(run.step_ends_s, prepend=0.0), first, summary["steps"])


def _mean(values: FloatArray, first: int, num_steps: int) -> float:
    """Return the mean of a value over ``num_steps`` steps; those not given are like those from ``first`` on."""
    num_more = num_steps - len(values)
    return float((values.sum() + (num_more * values[first:].mean() if num_more else 0.0)) / num_steps)
