"""From a sweep's axes to its runs: each one composed, and those left out that no topology or compression serves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossip.lab.experiments.experiment_build import import_modules, make_compression, make_topology
from gossip.lab.experiments.run_settings import Settings
from gossip.lab.sweeps import sweep_grid
from gossip.lab.sweeps.sweep_jobs import Job, check_distinct, make_job

_TOLD_APART = (
    "topology",
    "method",
    "launch.world_size",
    "data.partition",
    "algorithm",
    "compression",
    "engine",
    "seed",
)
"""Axes for which a row has fields of its own."""

Compose = Callable[[Sequence[str]], tuple[Mapping[str, Any], Mapping[str, str]]]


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep.

    Attributes
    ----------
    jobs : sequence of Job
        No two alike.
    left_out : sequence of str
        One line for each combination that cannot be, with the reason.
    """

    jobs: Sequence[Job]
    left_out: Sequence[str]


def make_plan(axes: Mapping[str, Sequence[str]], compose: Compose) -> Plan:
    """Expand, compose and sort out.

    Parameters
    ----------
    axes : mapping
        As of :func:`gossip.lab.sweeps.sweep_grid.expand`.
    compose : callable
        From overrides to the resolved configuration and the file that was chosen of each group; it raises for what does
        not exist.

    Raises
    ------
    ConfigurationError
        Two runs are the same, or a setting is out of range.
    """
    first = [overrides[0] for overrides in axes.values()]
    base, _ = compose(first)
    import_modules(base)
    other = sweep_grid.swept(axes, _TOLD_APART)
    jobs: list[Job] = []
    reasons: dict[str, str | None] = {}
    left_out: dict[str, None] = {}
    for overrides in sweep_grid.expand(axes, str(base["method"])):
        config, choices = compose(overrides)
        job = make_job(overrides, config, choices, other)
        key = json.dumps([config[part] for part in ("method", "topology", "algorithm", "compression", "launch")])
        if key not in reasons:
            reasons[key] = why_not_served(config)
        reason = reasons[key]
        if reason is None:
            jobs.append(job)
        else:
            left_out[f"{job.setting.label} on {job.setting.world_size} ranks is left out: {reason}"] = None
    check_distinct(jobs)
    return Plan(jobs, list(left_out))


def why_not_served(config: Mapping[str, Any]) -> str | None:
    """Why the topology cannot serve the ranks, or the compression the topology; None if they can."""
    settings = Settings.from_config(config)
    try:
        topology = make_topology(config, settings)
        if topology is not None:
            make_compression(config).check(topology)
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split())
    return None
