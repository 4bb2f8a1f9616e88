"""The plan of a sweep: its composed runs, without the combinations that a topology or compression does not support."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gossip.lab.experiments.experiment_build import import_modules, make_compression, make_topology
from gossip.lab.experiments.run_settings import Settings
from gossip.lab.experiments.validated_models import ConfigurationError, read, value_of
from gossip.lab.report.report_document import Choice
from gossip.lab.sweeps.sweep_jobs import (
    GOSSIP_ONLY,
    Job,
    Run,
    expand,
    fingerprint,
    make_setting,
    section_of,
    with_choice,
)

_OF_VARIANTS = (*GOSSIP_ONLY, "optimizer", "scheduler", "wrapper")
"""The config sections in which a setting may differ from all-reduce and still be compared with it."""

_TOLD_APART = (
    "topology", "method", "launch.world_size", "data.partition", "algorithm", "compression", "engine", "seed",
)  # fmt: skip
"""The axes for which a row has fields of its own."""

Compose = Callable[[Sequence[str]], tuple[Mapping[str, Any], Mapping[str, str]]]


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep, all distinct, and one line for each combination that is not possible, with the reason.

    The experiment is the one whose file was chosen, "none" without any.
    """

    jobs: Sequence[Job]
    left_out: Sequence[str]
    experiment: str


def make_plan(
    axes: Mapping[str, Sequence[str]],
    compose: Compose,
    variants: Sequence[Sequence[str]] = ((),),
    choose: Callable[[Run], Choice | None] = lambda _: None,
) -> Plan:
    """Expand the axes, compose the configuration of each run and leave out impossible combinations.

    ``compose`` maps overrides to the configuration and the selected file of each config group, and ``choose`` a run to
    the choice of its tuning. Raises ConfigurationError if two runs are the same, or a setting is out of range.
    """
    base, chosen = compose([overrides[0] for overrides in axes.values()])
    import_modules(base)
    keys = [key for key, overrides in axes.items() if len(overrides) > 1]
    keys += [override.partition("=")[0] for variant in variants for override in variant]
    other = [key for key in keys if key not in _TOLD_APART and section_of(key) != "algorithm"]
    jobs: dict[str, Job] = {}
    reasons: dict[str, str | None] = {}
    left_out: dict[str, None] = {}
    for run in expand(axes, str(base["method"]), variants):
        choice = choose(run)
        config, choices = compose(with_choice(run, choice))
        job = Job(run, config, make_setting(run, config, choices, other), choice)
        key = json.dumps([config[part] for part in ("method", "topology", "algorithm", "compression", "launch")])
        if key not in reasons:
            reasons[key] = why_not_served(config)
        if reasons[key] is not None:
            left_out[f"{job.setting.label} on {job.setting.world_size} ranks is left out: {reasons[key]}"] = None
            continue
        same = jobs.setdefault(fingerprint(config), job)
        if same is not job:
            raise ConfigurationError(
                f"two runs of the sweep are the same: {' '.join(same.overrides)} and {' '.join(job.overrides)}; leave "
                "out one of the values"
            )
    return Plan(list(jobs.values()), list(left_out), chosen.get("experiment", "none"))


def read_variants(config: Mapping[str, Any], axes: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Read ``sweep.variants``; if it is empty, return one variant without overrides."""
    texts = value_of(config, "sweep.variants")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(
            f"sweep.variants must be a list of texts, each of them options with spaces between them, got {texts!r}"
        )
    for text in texts:
        for override in shlex.split(text):
            key, equals, _ = override.partition("=")
            problem = ""
            if not equals:
                problem = f"has no value; write {key}=..."
            elif key in axes:
                problem = "is an option of the sweep too; leave it out there, or set sweep.variants=[]"
            elif section_of(key) not in _OF_VARIANTS:
                options = ", ".join(_OF_VARIANTS)
                problem = f"would be another one than all-reduce's; a variant may have options of {options}"
            if problem:
                raise ConfigurationError(f"sweep.variants={text}: {key} {problem}")
    return [tuple(shlex.split(text)) for text in texts] or [()]


def why_not_served(config: Mapping[str, Any]) -> str | None:
    """Return why the topology does not support the ranks, or the compression the topology; None if both do."""
    read(Settings, config)  # a setting out of range is no combination to leave out
    try:
        topology = make_topology(config)
        if topology is not None:
            make_compression(config).check(topology)
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split())
    return None
