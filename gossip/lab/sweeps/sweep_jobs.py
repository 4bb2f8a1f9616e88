"""One run of a sweep: its name, its folder, and whether it has been completed already."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import topologies
from gossip import ALGORITHMS
from gossip.lab.experiments import run_folder
from gossip.lab.experiments.config_store import options_of
from gossip.lab.experiments.targets import TARGET
from gossip.lab.experiments.validated_models import ConfigurationError, value_of
from gossip.lab.sweeps.sweep_grid import Run
from gossip.lab.sweeps.sweep_trials import Choice

_NOT_OF_THE_RUN = ("output_root", "figures", "resume", "sweep", "report", "cluster")
"""The config sections that do not affect what a run computes."""

_NOT_SHOWN = ("seed",)
"""The options of a topology that its label omits."""


@dataclass(frozen=True)
class Setting:
    """The setting of a run apart from its seed, which identifies a row of the result. The fields are for display.

    Rows with the same number of ranks, partition and condition are compared with the same all-reduce run.
    ``condition`` states the other varied options that apply to all-reduce too, such as ``data=digits``; None if there
    are none.
    """

    label: str
    method: str
    topology: str | None
    world_size: int
    partition: str
    condition: str | None
    algorithm: str | None
    compression: str | None
    engine: str


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes
    ----------
    run : Run
        The run of the grid.
    config : mapping
        The resolved configuration.
    setting : Setting
        The setting, which identifies the row to which the run belongs.
    choice : Choice or None
        The choice of the tuning; without a value the run cannot be made. None if the run is not tuned.
    """

    run: Run
    config: Mapping[str, Any]
    setting: Setting
    choice: Choice | None

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that turn the primary config into the configuration of the run."""
        return self.run.overrides if self.choice is None else (*self.run.overrides, *self.choice.overrides)

    @property
    def problem(self) -> str:
        """The reason why the run cannot be made; empty if it can."""
        return "" if self.choice is None else self.choice.problem

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @property
    def name(self) -> str:
        """The name of the run folder: readable, and unique to the configuration."""
        label = ", ".join(filter(None, (self.setting.label, self.setting.condition)))
        parts = [label, f"n{self.setting.world_size}", self.setting.partition, f"s{self.seed}"]
        slug = "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)
        return f"{slug[:80]}_{fingerprint(self.config)}"

    @property
    def command(self) -> str:
        """The command that makes the same run by itself."""
        return f"gossip train {shlex.join(self.overrides)}"

    def summary(self, sweep_folder: Path) -> dict[str, Any]:
        """Return the summary of the run, or a summary with the reason why it left none."""
        nothing = {
            "status": "failed",
            "reason": self.problem or f"its process ended without leaving {run_folder.SUMMARY_FILE}",
            "overrides": list(self.overrides),
        }
        try:
            summary = json.loads((sweep_folder / self.name / run_folder.SUMMARY_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            summary = {}
        return {**nothing, **summary, "job": self.name}

    def is_finished(self, sweep_folder: Path) -> bool:
        """Whether the run has been completed with exactly this configuration."""
        return bool(self.summary(sweep_folder)["status"] == "completed")

    def has_begun(self, sweep_folder: Path) -> bool:
        """Whether the run folder holds a configuration, so that the run has begun."""
        return (sweep_folder / self.name / run_folder.CONFIG_FILE).exists()

    def forget(self, sweep_folder: Path) -> None:
        """Remove the folder of a run that failed.

        Raises
        ------
        FolderError
            The run is in progress in another process.
        """
        if (sweep_folder / self.name).exists():
            with run_folder.lock(sweep_folder / self.name):
                shutil.rmtree(sweep_folder / self.name)


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return a hash of eight hexadecimal digits over everything that affects the result of a run."""
    content = {key: value for key, value in config.items() if key not in _NOT_OF_THE_RUN}
    content["launch"] = {"world_size": value_of(config, "launch.world_size")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:8]


def make_job(
    run: Run,
    config: Mapping[str, Any],
    choices: Mapping[str, str],
    other: Sequence[str],
    choice: Choice | None = None,
) -> Job:
    """Make the job of a run, with the setting that its configuration describes.

    Parameters
    ----------
    run : Run
        The run of the grid.
    config : mapping
        The resolved configuration as plain data.
    choices : mapping
        The selected file of each config group.
    other : sequence of str
        The keys of axes and variants that distinguish rows and for which a row has no field.
    choice : Choice, optional
        The choice of the tuning, which ``config`` already includes.
    """
    method = str(value_of(config, "method"))
    is_gossip = method == "gossip"
    told = [override for override in run.overrides if override.partition("=")[0] in other]
    setting = Setting(
        label=_label(config, method, [override for override in told if override not in run.reference]),
        method=method,
        topology=str(value_of(config, "topology.name")) if is_gossip else None,
        world_size=int(value_of(config, "launch.world_size")),
        partition=_partition(config["data"].get("partition") or {}),
        condition=", ".join(_plain(override) for override in told if override in run.reference) or None,
        algorithm=_algorithm(config, choices["algorithm"]) if is_gossip else None,
        compression=choices["compression"] if is_gossip else None,
        engine=str(value_of(config, "engine")),
    )
    return Job(run, config, setting, choice)


def check_distinct(jobs: Sequence[Job]) -> None:
    """Check that no two runs would compute the same.

    Raises
    ------
    ConfigurationError
        Two runs have the same configuration.
    """
    seen: dict[str, Job] = {}
    for job in jobs:
        other = seen.setdefault(fingerprint(job.config), job)
        if other is not job:
            raise ConfigurationError(
                f"two runs of the sweep are the same: {' '.join(other.overrides)} and {' '.join(job.overrides)}; leave "
                "out one of the values"
            )


def topology_label(config: Mapping[str, Any]) -> str:
    """Return the name of the topology, with the options that differ from its defaults."""
    options = config["topology"].get("options") or {}
    defaults = _defaults(str(value_of(config, "topology.name")))
    shown = [f"{key}={value}" for key, value in options.items() if value != defaults.get(key) and key not in _NOT_SHOWN]
    label = str(config["topology"]["name"]) + (f"({', '.join(shown)})" if shown else "")
    if config["topology"]["every"] > 1:
        label += f", every {config['topology']['every']} steps"
    if config["topology"]["warmup_rounds"]:
        label += f", after {config['topology']['warmup_rounds']} all-reduces"
    return label


def _plain(override: str) -> str:
    """Return an override as the user writes it: hydra escapes the colon of ``data=my_module:make``."""
    return override.replace("\\:", ":")


def _label(config: Mapping[str, Any], method: str, other: Sequence[str]) -> str:
    name = topology_label(config) if method == "gossip" else {"ddp": "all-reduce", "local": "no communication"}[method]
    return ", ".join([name, *other])


def _algorithm(config: Mapping[str, Any], name: str) -> str:
    """Return the name of the algorithm, with the options that differ from its defaults."""
    of_file = {key: value for key, value in config["algorithm"].items() if key not in (TARGET, "name", "options")}
    options = {**of_file, **(config["algorithm"].get("options") or {})}
    defaults = options_of("algorithm", name) if name in ALGORITHMS.available() else {}
    shown = [f"{key}={value}" for key, value in options.items() if key not in defaults or value != defaults[key]]
    return name + (f"({', '.join(shown)})" if shown else "")


def _defaults(topology: str) -> dict[str, Any]:
    """Return the default values of the options of a topology family."""
    try:
        parameters = inspect.signature(topologies.family(topology)).parameters
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return {name: parameter.default for name, parameter in parameters.items()}


def _partition(partition: Mapping[str, Any]) -> str:
    from gossip.lab.experiments.partition import DEFAULT_ALPHA, DEFAULT_SHARDS_PER_RANK

    scheme = str(partition.get("scheme", "iid"))
    values = {
        "dirichlet": (partition.get("alpha"), DEFAULT_ALPHA),
        "by_class": (partition.get("shards_per_rank"), DEFAULT_SHARDS_PER_RANK),
    }
    if scheme not in values:
        return scheme
    value, default = values[scheme]
    return f"{scheme}({default if value is None else value:g})"
