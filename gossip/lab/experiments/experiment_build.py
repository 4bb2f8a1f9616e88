"""Construction of an experiment from a resolved configuration; the only place that calls hydra's ``instantiate``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import topologies
from gossip import ALGORITHMS, COMPRESSIONS, Algorithm, Compression, GossipDataParallel
from gossip.lab.experiments.datasets import Data, as_data
from gossip.lab.experiments.partition import Shards, partition
from gossip.lab.experiments.run_settings import SECTION, Settings, check_values, check_wrapper_options, wrapper_options
from gossip.lab.experiments.targets import TARGET, check_targets, locate, trusted_names
from gossip.lab.experiments.validated_models import (
    FAULTS,
    ConfigurationError,
    blaming,
    check_options,
    named_in,
    read,
    shown,
    value_of,
)
from gossip.step.building.wrapper_arguments import prepare_algorithm, told_by_rank_0
from topologies import Topology
from topologies.registry import Registry

T = TypeVar("T")


class Experiment(NamedTuple):
    """Everything that a rank needs to train.

    Attributes
    ----------
    shards : Shards
        The samples that each rank trains on.
    divide : callable
        ``(world_size, seed) -> index arrays``: partitions the samples over another number of ranks.
    topology : Topology or None
        None for a method without a topology.
    make_wrapper : callable
        ``(module, optimizer, topology, **more) -> GossipDataParallel``, with ``wrapper_options`` unless ``more``
        overrides them. Collective.
    make_module : callable
        ``() -> Module``, initialised from torch's present random state.
    make_optimizer : callable
        ``(named parameters) -> Optimizer``.
    make_scheduler : callable
        ``(optimizer, total_steps) -> LRScheduler``, to be stepped once per step.
    """

    settings: Settings
    data: Data
    shards: Shards
    divide: Callable[[int, int], Sequence[npt.NDArray[np.int64]]]
    topology: Topology | None
    algorithm: Algorithm
    compression: Compression
    wrapper_options: Mapping[str, Any]
    make_wrapper: Callable[..., GossipDataParallel]
    make_module: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
    make_scheduler: Callable[[Optimizer, int], LRScheduler]

    def on(self, device: torch.device) -> Experiment:
        """Return the experiment with data and modules on a device."""
        return self._replace(data=self.data.to(device), make_module=lambda: self.make_module().to(device))

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run, with the configured number of ranks."""
        steps = self.settings.training.steps
        return self.settings.training.epochs * self.shards.steps_per_epoch if steps is None else steps


def build(config: Mapping[str, Any]) -> Experiment:
    """Build the experiment that a resolved configuration describes.

    Local and deterministic, so that every rank builds the same. A ValueError, TypeError, OSError or ImportError says
    which part of the configuration cannot be built.
    """
    import_modules(config)
    settings = read(Settings, config)
    topology = make_topology(config)
    options = wrapper_options(config)
    make_wrapper, _ = _instantiated(config, SECTION)
    check_wrapper_options(options, settings)
    data = as_data(_factory(config, "data", leaving_out=("partition", "on_loss"))(), config["data"][TARGET])

    def divide(world_size: int, seed: int) -> tuple[npt.NDArray[np.int64], ...]:
        options = dict(config["data"].get("partition", {}))
        check_options("data.partition", partition, options)
        with blaming("data.partition", options):
            return partition(data.train_labels, world_size, seed=seed, **options)

    indices, repeats = divide(settings.launch.world_size, settings.seed), settings.training.steps is not None
    shards = Shards(indices, settings.batch_size, settings.seed, repeats=repeats)
    model = _factory(config, "model")
    return Experiment(
        settings=settings,
        data=data,
        shards=shards,
        divide=divide,
        topology=topology,
        algorithm=make_algorithm(config),
        compression=make_compression(config),
        wrapper_options=options,
        make_wrapper=make_wrapper,
        make_module=lambda: model(data.input_shape, data.num_classes),
        make_optimizer=_factory(config, "optimizer"),
        make_scheduler=_factory(config, "scheduler"),
    )


def make_compression(config: Mapping[str, Any]) -> Compression:
    """Build the configured compression of the messages."""
    return _made(config, "compression", COMPRESSIONS, Compression)


def make_algorithm(config: Mapping[str, Any]) -> Algorithm:
    """Build the configured gossip algorithm."""
    return _made(config, "algorithm", ALGORITHMS, Algorithm)


def make_topology(config: Mapping[str, Any]) -> Topology | None:
    """Build the configured topology for the number of replicas; None for a method without a topology.

    It is refused if it does not exist, does not support the number of replicas, or would bias the average.
    """
    settings = read(Settings, config)
    if settings.method != "gossip":
        return None
    name, options = value_of(config, "topology.name"), config["topology"].get("options") or {}
    try:
        with told_by_rank_0():
            topology = topologies.build(name, settings.num_groups, **options).every(settings.topology.every)
            if settings.topology.order is not None:
                topology = topology.permuted(settings.topology.order)
        complete = topologies.build("complete", settings.num_groups)
        topology = complete.then(topology, after=settings.topology.warmup_rounds)
    except FAULTS as error:
        text = " ".join(str(error).split())
        cause = f"topology.name={name}"
        if (option := named_in(text, options)) is not None:
            cause = f"topology.options.{option}={shown(options[option])}"
        elif text.startswith("order "):
            cause = f"topology.order={shown(settings.topology.order)}"
        elif "world_size" in text:
            cause = f"launch.world_size={settings.launch.world_size}"
            if settings.launch.local_size > 1:
                cause += f" launch.local_size={settings.launch.local_size}"
        raise ConfigurationError(f"{cause}: {text}") from error
    algorithm = make_algorithm(config)
    try:
        algorithm.requires.check(topology, algorithm.describe())
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return topology


def check(config: Mapping[str, Any]) -> Experiment:
    """Build everything once, so that user errors are found before any worker starts, as a ConfigurationError."""
    try:
        experiment = build(config)
        module = experiment.make_module()
        check_values(experiment.wrapper_options, module)
        optimizer = experiment.make_optimizer(list(module.named_parameters()))
        experiment.make_scheduler(optimizer, experiment.total_steps)
        if experiment.topology is not None:
            parts = experiment.algorithm, experiment.topology, experiment.compression
            averages_buffers = experiment.wrapper_options.get("buffers") == "average"
            prepare_algorithm(*parts, (optimizer,), averages_buffers=averages_buffers)
        _check_model_takes_data(module, experiment.data)
    except ConfigurationError:
        raise
    except KeyError as error:
        raise ConfigurationError(f"the configuration has no key {error}; do not remove it") from error
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigurationError(" ".join(str(error).split())) from error
    return experiment


def import_modules(config: Mapping[str, Any]) -> None:
    """Import the modules listed under ``imports`` in the configuration."""
    names = config.get("imports") or ()
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigurationError(f"imports={names} is no list of modules; write imports=[module]")
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f"imports={name} cannot be imported: {error}; put its folder on the path, PYTHONPATH=folder"
            ) from error


def _check_model_takes_data(module: nn.Module, data: Data) -> None:
    needed = [*data.train_targets[:2].shape, data.num_classes]
    try:
        with torch.no_grad():
            logits = module.eval()(data.train_inputs[:2])
        found = f"gives outputs of shape {list(logits.shape)} for 2 samples of {data.name}, but {needed} is needed"
    except (RuntimeError, ValueError, IndexError) as error:
        logits = None
        found = (
            f"cannot take the inputs of {data.name} ({data.train_inputs.dtype}, "
            f"{list(data.train_inputs.shape[1:])} a sample): {str(error).splitlines()[0]}"
        )
    if logits is None or list(logits.shape) != needed:
        is_text = data.train_inputs.dtype == torch.int64 and data.train_targets.ndim > 1
        remedy = "model=char_transformer takes text" if is_text else "choose another model=... or data=..."
        raise ConfigurationError(f"{type(module).__name__} {found}; {remedy}")


def _factory(config: Mapping[str, Any], key: str, *, leaving_out: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the callable that ``config[key]["_target_"]`` names, bound to the other entries as keyword arguments.

    Calling it raises a ConfigurationError that names the option at fault.
    """
    factory, section = _instantiated(config, key, leaving_out)

    def make(*arguments: Any) -> Any:
        with blaming(key, section):
            return factory(*arguments)

    return make


def _made(config: Mapping[str, Any], key: str, registry: Registry[Callable[..., T]], kind: type) -> T:
    """Build the object that ``config[key]`` describes: by a registered name with its options, or by a target."""
    name, options = config[key].get("name"), config[key].get("options") or {}
    if config[key].get(TARGET) or name is None:
        made: T = _factory(config, key)()
        name = config[key][TARGET]
    else:
        make = registry.get(name)
        check_options(f"{key}.options", make, options)
        with blaming(f"{key}.options", options):
            made = make(**options)
    if not isinstance(made, kind):
        raise ConfigurationError(
            f"{key}={name} makes a {type(made).__name__}, but a gossip.{kind.__name__} is needed; have its class "
            f"extend that"
        )
    return made


def _instantiated(
    config: Mapping[str, Any], key: str, leaving_out: Sequence[str] = ()
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return the bound target of the section ``key``, which is allowed and has its options, and the section."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    section = {name: value for name, value in config[key].items() if name not in leaving_out}
    if not section.get(TARGET):
        raise ConfigurationError(f"{key} has no {TARGET}; choose one of the group's files, {key}=...")
    check_targets(key, section, trusted_names(config))
    place = f"{key}.{TARGET}"
    check_options(key, locate(place, section[TARGET]), section)
    try:
        return instantiate({**section, "_partial_": True}, _convert_="all"), section
    except InstantiationException as error:
        called = [name for name, value in section.items() if isinstance(value, Mapping) and not value.get("_partial_")]
        hint = f"; if {key}.{called[0]} is to be a factory, add _partial_: true to it" if called else ""
        cause = f"{error.__cause__ or error}{hint}"
        raise ConfigurationError(f"{place}={section[TARGET]} cannot be made: {cause}") from error
