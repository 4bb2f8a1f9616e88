"""The result document of a sweep: rows, curves and common settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip.lab.experiments import run_folder
from gossip.lab.experiments.run_settings import Settings
from gossip.lab.experiments.validated_models import read, value_of
from gossip.lab.report.report_document import Document, Metric
from gossip.lab.sweeps.sweep_jobs import Job
from gossip.lab.sweeps.sweep_plan import Plan
from gossip.lab.sweeps.sweep_prediction import make_cluster
from gossip.lab.sweeps.sweep_rows import make_rows

_MOST_NAMED = 4


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
    """Return the settings that all runs share, which the rows do not show."""
    texts = [_settings(config) for config in configs]
    common = {
        part: _common_text([each[part] for each in configs]) for part in ("model", "data", "optimizer", "scheduler")
    }
    common |= {name: text for name, text in texts[0].items() if all(other[name] == text for other in texts)}
    return {name: text for name, text in common.items() if text}


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    settings = read(Settings, config)
    training, world_size = settings.training, settings.launch.world_size
    return {
        "samples per rank and step": str(settings.batch_size),
        "samples per step": str(training.total_batch_size or settings.batch_size * world_size),
        "length": f"{training.epochs} epochs" if training.steps is None else f"{training.steps} steps",
        "engine": settings.engine,
    }


def _common_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """Format a config section as a call with the options that all runs share; empty if the targets differ."""
    first = parts[0]
    if any(part["_target_"] != first["_target_"] for part in parts):
        return ""
    name = str(first["_target_"]).rpartition(".")[2]
    options = [
        f"{key}={value}"
        for key, value in first.items()
        if key not in ("_target_", "partition") and all(key in part and part[key] == value for part in parts)
    ]
    return f"{name}({', '.join(options)})"


def _cluster(jobs: Sequence[Job]) -> dict[str, Any]:
    config = jobs[0].config
    described = dict(config["cluster"])
    sizes = sorted({make_cluster(job.config, job.setting.world_size).num_nodes for job in jobs})
    ranks = "rank" if described["local_size"] == 1 else "ranks"
    return {
        **described,
        "num_nodes": sizes[0] if len(sizes) == 1 else None,
        "description": f"{', '.join(map(str, sizes))} nodes of {described['local_size']} {ranks}, links of "
        f"{described['bandwidth_gbps']:g} Gb/s and {described['latency_us']:g} us; a rank computes "
        f"{described['compute_us_per_sample']:g} us per sample, more or less {described['jitter']:.0%}",
    }
