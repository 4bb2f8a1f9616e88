"""The validated configuration of a benchmark (configs/bench.yaml)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossip.lab.benchmarks import shaped_hosts, stragglers
from gossip.lab.benchmarks.bench_methods import check
from gossip.lab.benchmarks.bench_models import WORKLOADS
from gossip.lab.benchmarks.bench_specification import MethodSpecification
from gossip.lab.benchmarks.networks import bits_per_second
from gossip.lab.experiments.validated_models import ConfigurationError, nearest, value_of

NETWORKS = ("loopback", "lab")


@dataclass(frozen=True)
class Settings:
    """The settings of a benchmark: what is measured, and how often.

    Attributes
    ----------
    model : str
        A key of :data:`gossip.lab.benchmarks.bench_models.WORKLOADS`.
    world_size : int
        The number of workers.
    local_size : int
        The number of workers on each host of the lab.
    network : str
        Either "loopback" or "lab".
    rates : tuple of str
        The rates of every link of the lab in each direction, in the notation of tc; each has a table of its own.
    straggler : str
        One of :data:`gossip.lab.benchmarks.stragglers.KINDS`.
    repetitions, warmup_steps, steps : int
        The numbers of repetitions, warm-up steps and measured steps of every method.
    num_threads : int
        The number of torch threads per worker.
    seed : int
        The seed of the initial values, the batches and the delays.
    timeout_s : float
        The time-out of any wait for other ranks.
    methods : tuple of MethodSpecification
    probe_bucket_cap_mb : float or None
        See :class:`gossip.lab.benchmarks.bench_specification.WorkerSpecification`; not an option of the configuration.
    """

    model: str
    world_size: int
    local_size: int
    network: str
    rates: tuple[str, ...]
    straggler: str
    repetitions: int
    warmup_steps: int
    steps: int
    num_threads: int
    seed: int
    timeout_s: float
    methods: tuple[MethodSpecification, ...]
    probe_bucket_cap_mb: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Settings:
        """Read and check a resolved configuration.

        Raises
        ------
        ConfigurationError
            A value is missing, of the wrong type or out of range.
        """
        network = _choice(config, "bench.network", NETWORKS)
        world_size = _integer(config, "bench.world_size", minimum=2)
        local_size = _integer(config, "bench.local_size", minimum=1)
        if world_size % local_size:
            raise ConfigurationError(
                f"bench.local_size={local_size} does not divide bench.world_size={world_size}; every host has as many"
            )
        if network == "lab" and world_size // local_size > shaped_hosts.MAX_HOSTS:
            raise ConfigurationError(
                f"bench.world_size must be at most {shaped_hosts.MAX_HOSTS} in the lab, got {world_size}"
            )
        rates = _rates(value_of(config, "bench.rate"))
        if network != "lab" and len(rates) > 1:
            raise ConfigurationError(
                f"bench.rate={list(rates)}: bench.network={network} has no rate; set bench.network=lab"
            )
        timeout_s = value_of(config, "bench.timeout_s")
        if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s < float("inf"):
            raise ConfigurationError(f"bench.timeout_s must be a positive number, got {timeout_s!r}")
        return cls(
            model=_choice(config, "bench.model", tuple(WORKLOADS)),
            world_size=world_size,
            local_size=local_size,
            network=network,
            rates=rates,
            straggler=_choice(config, "bench.straggler", stragglers.KINDS),
            repetitions=_integer(config, "bench.repetitions", minimum=1),
            warmup_steps=_integer(config, "bench.warmup_steps", minimum=2),
            steps=_integer(config, "bench.steps", minimum=1),
            num_threads=_integer(config, "bench.threads", minimum=1),
            seed=_integer(config, "bench.seed", minimum=0),
            timeout_s=float(timeout_s),
            methods=expand(value_of(config, "bench.methods"), world_size, local_size),
        )


def expand(methods: Any, world_size: int, local_size: int = 1) -> tuple[MethodSpecification, ...]:
    """Return one row per combination of the values of options that are lists.

    Parameters
    ----------
    methods : mapping
        A mapping of names to options. The option ``method`` is "local", "ddp", "hsdp", "decent_dp" or "gossip", by
        default the name; all other options are keyword arguments. If an option is a list, each of its values gets a
        row. The value "none" omits an option.
    world_size, local_size : int
        The number of all ranks, and the number of ranks on each host.

    Raises
    ------
    ConfigurationError
        There is no method, a method does not exist, or an option cannot be used.

    Examples
    --------
    >>> [row.label for row in expand({"local": {}, "gossip": {"topology": ["ring", "complete"]}}, 4)]
    ['local', 'gossip ring', 'gossip complete']
    """
    if not isinstance(methods, Mapping) or not methods:
        raise ConfigurationError(f"bench.methods must map names to options, got {methods!r}; try bench/methods=main")
    rows: list[MethodSpecification] = []
    for name, given in methods.items():
        if not isinstance(given, Mapping | None):
            raise ConfigurationError(f"bench.methods.{name} must be a mapping of options, got {given!r}")
        options = dict(given or {})
        kind = str(options.pop("method", name))
        choices = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
        for key, choice in choices.items():
            if not choice:
                raise ConfigurationError(
                    f"bench.methods.{name}.{key} is an empty list; give it at least one value, or none"
                )
        for values in itertools.product(*choices.values()):
            row = dict(zip(choices, values, strict=True))
            words = [_words(key, value) for key, value in row.items() if len(choices[key]) > 1]
            chosen = {key: value for key, value in row.items() if value not in (None, "none")}
            check(kind, chosen, world_size, local_size)
            rows.append(MethodSpecification(" ".join([str(name), *filter(None, words)]), kind, chosen))
    return tuple(rows)


def _words(option: str, value: Any) -> str:
    if value in (None, "none"):
        return ""
    if isinstance(value, Mapping):
        return " ".join(str(entry) for entry in value.values())
    unit = " MiB" if option in ("bucket_cap_mb", "bucket_size_in_mb") else ""
    return f"{value}{unit}" if isinstance(value, str) or unit else f"{option}={value}"


def _rates(value: Any) -> tuple[str, ...]:
    rates = value if isinstance(value, list) else [value]
    try:
        for rate in rates:
            bits_per_second(str(rate))
    except ValueError as error:
        raise ConfigurationError(f"bench.{error}") from error
    if not rates:
        raise ConfigurationError("bench.rate must be a rate, or a list of at least one, such as [50mbit,200mbit]")
    return tuple(str(rate) for rate in rates)


def _choice(config: Mapping[str, Any], key: str, names: tuple[str, ...]) -> str:
    name = value_of(config, key)
    if name not in names:
        raise ConfigurationError(f"there is no {key}={name}{nearest(str(name), names)} Available: {', '.join(names)}")
    return str(name)


def _integer(config: Mapping[str, Any], key: str, *, minimum: int) -> int:
    value = value_of(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigurationError(f"{key} must be an integer of at least {minimum}, got {value!r}")
    return value
