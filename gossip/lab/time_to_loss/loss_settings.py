"""The validated configuration of a run (configs/time_to_loss.yaml)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossip.lab.benchmarks import shaped_hosts
from gossip.lab.benchmarks.bench_settings import NETWORKS, expand
from gossip.lab.benchmarks.bench_specification import MethodSpecification
from gossip.lab.benchmarks.networks import bits_per_second
from gossip.lab.experiments.validated_models import ConfigurationError, nearest
from gossip.lab.time_to_loss.loss_tasks import TASKS

_MAX_DELAY_S = 1.0


@dataclass(frozen=True)
class Link:
    """The link by which every host of the lab is connected.

    Attributes
    ----------
    name : str
        The text of the configuration.
    bits_per_second : int
        The rate in each direction.
    delay_s : float
        The one-way delay between two hosts, in addition to the transmission time.
    """

    name: str
    bits_per_second: int
    delay_s: float

    @classmethod
    def parse(cls, name: str) -> Link:
        """Parse a rate in the notation of tc, optionally followed by a delay.

        Raises
        ------
        ValueError
            The text is not a rate with an optional delay, or a value is out of range.

        Examples
        --------
        >>> Link.parse("50mbit+50ms").delay_s
        0.05
        """
        rate, plus, delay = name.partition("+")
        found = re.fullmatch(r"(\d+(?:\.\d+)?)ms", delay.strip())
        delay_s = float(found[1]) / 1e3 if found else 0.0
        if (plus and not found) or delay_s > _MAX_DELAY_S:
            raise ValueError(
                f"a link's delay must be a number with ms, at most {1e3 * _MAX_DELAY_S:g}, such as 50mbit+50ms, "
                f"got {name!r}"
            )
        return cls(name, bits_per_second(rate), delay_s)


@dataclass(frozen=True)
class LossSettings:
    """The settings of a run.

    Attributes
    ----------
    tasks : tuple of str
        Keys of :data:`gossip.lab.time_to_loss.loss_tasks.TASKS`.
    world_size : int
    network : str
        Either "loopback" or "lab".
    links : tuple of Link
        The links of the lab, which are measured one after another.
    seeds : tuple of int
    steps, evaluate_every : int
        The number of steps that all-reduce makes, and the number of steps of every method between evaluations.
    max_time_ratio : float
        The time limit of the other methods, as a multiple of all-reduce's time.
    predict : bool
        Whether virtual workers train too, for a prediction.
    num_threads : int
        The number of torch threads per worker.
    timeout_s : float
        The time-out of any wait for other ranks.
    as_probed : bool
        Whether gossip as chosen by the probe is an additional method.
    methods : tuple of MethodSpecification
        The methods, the first of which is all-reduce.
    """

    tasks: tuple[str, ...]
    world_size: int
    network: str
    links: tuple[Link, ...]
    seeds: tuple[int, ...]
    steps: int
    evaluate_every: int
    max_time_ratio: float
    predict: bool
    num_threads: int
    timeout_s: float
    as_probed: bool
    methods: tuple[MethodSpecification, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LossSettings:
        """Read and check a configuration that has all keys of configs/time_to_loss.yaml.

        Raises
        ------
        ConfigurationError
            A value is of the wrong type or out of range.
        """
        tasks = tuple(_choice("tasks", name, tuple(TASKS)) for name in _list(config, "tasks"))
        world_size = _integer("world_size", config["world_size"], 2, shaped_hosts.MAX_HOSTS)
        try:
            links = tuple(Link.parse(str(name)) for name in _list(config, "links"))
        except ValueError as error:
            raise ConfigurationError(f"links: {error}") from error
        methods = expand(config["methods"], world_size)
        if methods[0].kind != "ddp":
            raise ConfigurationError(
                f"methods must begin with all-reduce, method ddp, whose loss the others are to reach; the first is "
                f"{methods[0].label}"
            )
        return cls(
            tasks=tasks,
            world_size=world_size,
            network=_choice("network", config["network"], NETWORKS),
            links=links,
            seeds=tuple(_integer("seeds", seed, 0) for seed in _list(config, "seeds")),
            steps=_integer("steps", config["steps"], 1),
            evaluate_every=_integer("evaluate_every", config["evaluate_every"], 1),
            max_time_ratio=_positive("max_time_ratio", config["max_time_ratio"]),
            predict=_boolean("predict", config["predict"]),
            num_threads=_integer("threads", config["threads"], 1),
            timeout_s=_positive("timeout_s", config["timeout_s"]),
            as_probed=_boolean("as_probed", config["as_probed"]),
            methods=methods,
        )


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    values = config[key]
    if not isinstance(values, list) or not values:
        raise ConfigurationError(f"{key} must be a list of at least one value, got {values!r}")
    return values


def _choice(key: str, name: Any, names: tuple[str, ...]) -> str:
    if name not in names:
        raise ConfigurationError(f"there is no {key}={name}{nearest(str(name), names)} Available: {', '.join(names)}")
    return str(name)


def _integer(key: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    if type(value) is not int or value < minimum or (maximum is not None and value > maximum):
        allowed = f"of at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ConfigurationError(f"{key} must be an integer {allowed}, got {value!r}")
    return value


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{key} must be true or false, got {value!r}")
    return value


def _positive(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigurationError(f"{key} must be a positive number, got {value!r}")
    return float(value)
