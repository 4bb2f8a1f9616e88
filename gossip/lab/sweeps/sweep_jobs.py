"""The runs of a sweep: every combination of its axes, with a name and a folder each, and the baselines once.

Its plan leaves out the combinations that a topology or compression does not support.
"""

import hashlib
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from gossip import ALGORITHMS
from gossip.lab.experiments import run_folder
from gossip.lab.experiments.config_store import options_of
from gossip.lab.experiments.experiment_build import import_modules, make_compression, make_topology
from gossip.lab.experiments.partition import OPTIONS
from gossip.lab.experiments.run_settings import Settings
from gossip.lab.experiments.targets import TARGET
from gossip.lab.experiments.validated_models import ConfigurationError, check_type, read, value_of
from gossip.lab.report.report_document import Choice, Setting

BASELINES = ("ddp", "local")
"""The methods with which every setting is compared: all-reduce, and no exchange at all."""

REFERENCE = "ddp"
"""The baseline to which differences are computed, seed by seed."""

GOSSIP_ONLY = ("topology", "algorithm", "compression")
"""The config sections that do not apply to the baselines."""

_OF_VARIANTS = (*GOSSIP_ONLY, "optimizer", "scheduler", "wrapper")
"""The config sections in which a setting may differ from all-reduce and still be compared with it."""

_TOLD_APART = (
    "topology", "method", "launch.world_size", "data.partition", "algorithm", "compression", "engine", "seed",
)  # fmt: skip
"""The axes for which a row has fields of its own."""

Axes = Mapping[str, Sequence[str]]
Compose = Callable[[Sequence[str]], tuple[Mapping[str, Any], Mapping[str, str]]]


class Run(NamedTuple):
    """One run of a sweep, as overrides of the primary config, and the all-reduce run with which it is compared.

    That one has the same ranks, data, seed and other settings that apply to both; for itself, it is the run.
    """

    overrides: tuple[str, ...]
    reference: tuple[str, ...]


def expand(axes: Axes, method: str = "gossip", variants: Sequence[Sequence[str]] = ((),)) -> list[Run]:
    """Expand the axes of a sweep into its runs.

    Every combination of the axes, which have the overrides ``key=value`` of each key, is a run, of this method unless
    ``method`` is among them; gossip combines it with each variant, a group of overrides. The baselines do not depend on
    topology, algorithm and compression: for each combination of the other axes (ranks, partition, seed, ...) there is
    one run of each baseline.

    Examples
    --------
    >>> for run in expand({"topology": ["topology=ring", "topology=star"], "seed": ["seed=0"]}):
    ...     print(*run.overrides)
    topology=ring seed=0
    topology=star seed=0
    seed=0 method=ddp
    seed=0 method=local
    """
    runs, baselines = list[Run](), list[Run]()
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        own_method = chosen.get("method", f"method={method}").partition("=")[2]
        common = tuple(override for key, override in chosen.items() if key != "method" and not is_gossip_only(key))
        reference = (*common, f"method={REFERENCE}")
        if own_method not in BASELINES:
            runs += [Run((*chosen.values(), *variant), reference) for variant in variants]
        baselines += [Run((*common, f"method={baseline}"), reference) for baseline in BASELINES]
    return list(dict.fromkeys([*runs, *baselines]))


def is_gossip_only(key: str) -> bool:
    """Whether an override of ``key`` does not apply to the baselines."""
    return section_of(key) in GOSSIP_ONLY


def section_of(key: str) -> str:
    """Return the config section that an override of ``key`` changes."""
    return key.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]


_NOT_OF_THE_RUN = ("output_root", "figures", "resume", "sweep", "report", "cluster")
"""The config sections that do not affect what a run computes."""


class Job(NamedTuple):
    """One run of a sweep, with its resolved configuration, the setting that identifies its row, and its tuning."""

    run: Run
    config: Mapping[str, Any]
    setting: Setting
    choice: Choice | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that turn the primary config into the configuration of the run."""
        return with_choice(self.run, self.choice)

    @property
    def problem(self) -> str:
        """The reason why the run cannot be made; empty if it can."""
        choice = self.choice
        if choice is None or choice.value is not None:
            return ""
        reasons = [f"{trial.value:g}: {trial.reason or 'its loss is not finite'}" for trial in choice.trials]
        return f"no value of {choice.parameter} could be chosen with seed {choice.seed}: {'; '.join(reasons)}"

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.config["seed"])

    @property
    def name(self) -> str:
        """The name of the run folder: readable, and unique to the configuration."""
        label = ", ".join(filter(None, (self.setting.label, self.setting.condition)))
        parts = [label, f"n{self.setting.world_size}", str(self.setting.partition), f"s{self.seed}"]
        slug = "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)
        return f"{slug[:80]}_{fingerprint(self.config)}"

    def summary(self, sweep_folder: Path) -> dict[str, Any]:
        """Return the summary of the run, or a summary with the reason why it left none."""
        summary = run_folder.read_summary(sweep_folder / self.name, self.overrides, self.problem)
        return {**summary, "job": self.name}

    def is_finished(self, sweep_folder: Path) -> bool:
        """Whether the run has been completed with exactly this configuration."""
        return bool(self.summary(sweep_folder)["status"] == "completed")

    def forget(self, sweep_folder: Path) -> None:
        """Remove the folder of a run that failed; raises ``FolderError`` while another process works in it."""
        if (sweep_folder / self.name).exists():
            with run_folder.lock(sweep_folder / self.name):
                shutil.rmtree(sweep_folder / self.name)


def with_choice(run: Run, choice: Choice | None) -> tuple[str, ...]:
    """Return the overrides of a run, with the value that its tuning chose."""
    if choice is None or choice.value is None:
        return run.overrides
    return (*run.overrides, f"{choice.parameter}={choice.value!r}")


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return a hash of eight hexadecimal digits over everything that affects the result of a run."""
    content = {key: value for key, value in config.items() if key not in _NOT_OF_THE_RUN}
    content["launch"] = {"world_size": value_of(config, "launch.world_size")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:8]


def make_setting(run: Run, config: Mapping[str, Any], choices: Mapping[str, str], other: Sequence[str]) -> Setting:
    """Return the setting of a configuration, for which these files of the config groups are selected.

    ``other`` are the keys of axes and variants that distinguish rows without being a field of theirs.
    """
    method = str(value_of(config, "method"))
    is_gossip = method == "gossip"
    told = [override for override in run.overrides if override.partition("=")[0] in other]
    name = topology_label(config) if is_gossip else {"ddp": "all-reduce", "local": "no communication"}[method]
    # Hydra escapes the colon of data=my_module:make.
    shared = [override.replace("\\:", ":") for override in told if override in run.reference]
    return Setting(
        label=", ".join([name, *(override for override in told if override not in run.reference)]),
        method=cast(Literal["gossip", "ddp", "local"], method),
        topology=str(value_of(config, "topology.name")) if is_gossip else None,
        world_size=int(value_of(config, "launch.world_size")),
        partition=_partition(config["data"].get("partition") or {}),
        condition=", ".join(shared) or None,
        algorithm=_algorithm(config, choices["algorithm"]) if is_gossip else None,
        compression=choices["compression"] if is_gossip else None,
        engine=str(value_of(config, "engine")),
    )


def topology_label(config: Mapping[str, Any]) -> str:
    """Return the name of the topology, with the options other than a seed that differ from its defaults."""
    topology = config["topology"]
    try:
        defaults = options_of("topology", topology["name"])
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    options = {key: value for key, value in (topology.get("options") or {}).items() if key != "seed"}
    label = _called(topology["name"], options, defaults)
    if topology["every"] > 1:
        label += f", every {topology['every']} steps"
    if topology["order"]:
        label += f", order {topology['order']}"
    if topology["warmup_rounds"]:
        label += f", after {topology['warmup_rounds']} all-reduces"
    return label


def _algorithm(config: Mapping[str, Any], name: str) -> str:
    of_file = {key: value for key, value in config["algorithm"].items() if key not in (TARGET, "name", "options")}
    options = {**of_file, **(config["algorithm"].get("options") or {})}
    return _called(name, options, options_of("algorithm", name) if name in ALGORITHMS.available() else {})


def _called(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return a name with the options that differ from their defaults."""
    shown = [f"{key}={value}" for key, value in options.items() if key not in defaults or value != defaults[key]]
    return f"{name}({', '.join(shown)})" if shown else name


def _partition(partition: Mapping[str, Any]) -> str:
    scheme = str(partition.get("scheme", "iid"))
    if scheme not in OPTIONS:
        return scheme
    option, default = OPTIONS[scheme]
    return f"{scheme}({partition.get(option) or default:g})"


_FOLDER = "hydra.sweep.dir"
_NOT_OF_THE_NAME = ("seed", "figures", "output_root", "sweep", "hydra")
"""Config keys and sections that do not distinguish one sweep from another."""


def folder_option(arguments: Sequence[str]) -> list[str]:
    """Return the option that sets the folder of a sweep, as the only entry of a list; the same sweep finds it again.

    It is empty where ``experiment=`` or ``hydra.sweep.dir=`` determines the folder, and for arguments that hydra cannot
    parse, which it reports itself.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        overrides = OverridesParser.create().parse_overrides([each for each in arguments if each[:1] != "-"])
    except OverrideParseException:
        return []
    if {_FOLDER, "experiment"} & {override.key_or_group for override in overrides}:
        return []
    by_key = {}
    for override in overrides:
        key = override.get_key_element().lstrip("+~")
        if key.partition(".")[0].partition("/")[0] not in _NOT_OF_THE_NAME:
            is_swept = override.is_sweep_override()
            by_key[key] = key if is_swept else f"{key}={override.get_value_element_as_str()}"
    parts = sorted(by_key.values())
    slug = "_".join(re.sub(r"[^\w.]+", "-", re.sub(r"^[^=]*\.", "", part)).strip("-") for part in parts) or "defaults"
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
    return [f"{_FOLDER}=${{output_root}}/sweeps/{slug[:80]}_{digest}"]


class Plan(NamedTuple):
    """The runs of a sweep, all distinct, and one line for each combination that is not possible, with the reason.

    The experiment is the one whose file was chosen, "none" without any.
    """

    jobs: Sequence[Job]
    left_out: Sequence[str]
    experiment: str


def make_plan(
    axes: Axes,
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
        if (same := jobs.setdefault(fingerprint(config), job)) is not job:
            raise ConfigurationError(
                f"two runs of the sweep are the same: {' '.join(same.overrides)} and {' '.join(job.overrides)}; leave "
                "out one of the values"
            )
    return Plan(list(jobs.values()), list(left_out), chosen.get("experiment", "none"))


def read_variants(config: Mapping[str, Any], axes: Axes) -> list[tuple[str, ...]]:
    """Read ``sweep.variants``; if it is empty, return one variant without overrides."""
    texts = value_of(config, "sweep.variants")
    check_type("sweep.variants", list[str], texts)
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
        if (topology := make_topology(config)) is not None:
            make_compression(config).check(topology)
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split())
    return None
