"""Construction of an experiment from a resolved configuration; the only place that calls hydra's ``instantiate``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import topologies
from gossip import ALGORITHMS, COMPRESSIONS, Algorithm, Compression, GossipDataParallel
from gossip.lab.experiments.datasets import Data, as_data
from gossip.lab.experiments.options import FAULTS, blaming, check_options, named_in
from gossip.lab.experiments.partition import partition
from gossip.lab.experiments.run_settings import Settings
from gossip.lab.experiments.sample_batches import Shards
from gossip.lab.experiments.targets import OPTION, TARGET, check_targets, locate
from gossip.lab.experiments.validated_models import ConfigurationError, shown, value_of
from gossip.lab.experiments.wrapper_options import SECTION, check_values, check_wrapper_options, wrapper_options
from gossip.lab.loggers.logger_choice import JSONL, logging_settings
from gossip.step.building.wrapper_arguments import prepare_algorithm
from topologies import Topology
from topologies.registry import Registry


@dataclass(frozen=True)
class Experiment:
    """Everything that a rank needs to train.

    Attributes
    ----------
    settings : Settings
        The checked settings of the run.
    data : Data
        The data set.
    shards : Shards
        The samples that each rank trains on.
    divide : callable
        ``(world_size, seed) -> index arrays``: partitions the samples over another number of ranks.
    topology : Topology or None
        The topology; None for a method without one.
    algorithm : Algorithm
        The gossip algorithm, for the methods that mix replicas.
    compression : Compression
        The compression of the messages, for the methods that mix replicas.
    wrapper_options : mapping
        The options in the section ``wrapper``.
    make_wrapper : callable
        ``(module, optimizer, topology, **more) -> GossipDataParallel``, with ``wrapper_options`` unless ``more``
        overrides them. Collective.
    make_module : callable
        ``() -> Module``, initialised from torch's present random state.
    make_optimizer : callable
        ``(named parameters) -> Optimizer``.
    make_scheduler : callable
        ``(optimizer, total_steps) -> LRScheduler``, to be stepped once per step.
    is_followed : bool
        Whether loggers besides the JSON lines are selected.
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
    is_followed: bool

    @property
    def total_steps(self) -> int:
        """The number of steps of the whole run, with the configured number of ranks."""
        steps = self.settings.training.steps
        return self.settings.training.epochs * self.shards.steps_per_epoch if steps is None else steps

    @property
    def num_epochs(self) -> int:
        """The number of epochs that the run begins; the last one may be incomplete."""
        return -(-self.total_steps // self.shards.steps_per_epoch)


def build(config: Mapping[str, Any]) -> Experiment:
    """Build the experiment that ``config`` describes. Local and deterministic, so that every rank builds the same.

    Parameters
    ----------
    config : mapping
        The resolved configuration as plain data: dictionaries, lists, strings and numbers.

    Raises
    ------
    ValueError, TypeError, OSError, ImportError
        A part of the configuration cannot be built; the message says which.
    """
    import_modules(config)
    check_targets(config)
    settings = Settings.from_config(config)
    data = as_data(_factory(config, "data", leaving_out=("partition", "on_loss"))(), config["data"][TARGET])

    def divide(world_size: int, seed: int) -> tuple[npt.NDArray[np.int64], ...]:
        return _partition(config, data, world_size, seed)

    shards = Shards(
        divide(settings.launch.world_size, settings.seed),
        batch_size=settings.batch_size,
        seed=settings.seed,
        repeats=settings.training.steps is not None,
    )
    model = _factory(config, "model")
    return Experiment(
        settings=settings,
        data=data,
        shards=shards,
        divide=divide,
        topology=make_topology(config, settings),
        algorithm=make_algorithm(config),
        compression=make_compression(config),
        wrapper_options=wrapper_options(config),
        make_wrapper=_instantiated(SECTION, _checked(config, SECTION)),
        make_module=lambda: model(data.input_shape, data.num_classes),
        make_optimizer=_factory(config, "optimizer"),
        make_scheduler=_factory(config, "scheduler"),
        is_followed=any(name != JSONL for name in config.get("logger") or ()),
    )


def _partition(config: Mapping[str, Any], data: Data, world_size: int, seed: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the sample indices of each rank."""
    options = dict(config["data"].get("partition", {}))
    check_options("data.partition", partition, options)
    try:
        return partition(data.train_labels, world_size, seed=seed, **options)
    except FAULTS as error:
        raise blaming("data.partition", options, error, lambda _: False) from error


def make_compression(config: Mapping[str, Any]) -> Compression:
    """Build the configured compression of the messages."""
    made: Compression = _made(config, "compression", COMPRESSIONS, Compression)
    return made


def make_topology(config: Mapping[str, Any], settings: Settings) -> Topology | None:
    """Build the configured topology for the number of replicas; None for a method without a topology.

    Raises
    ------
    ValueError, TypeError
        The topology does not exist, does not support the number of replicas, or would bias the average.
    """
    if settings.method != "gossip":
        return None
    name, options = value_of(config, "topology.name"), config["topology"].get("options") or {}
    try:
        topology = topologies.build(name, settings.num_groups, **options).every(settings.topology.every)
        topology = topologies.build("complete", settings.num_groups).then(
            topology, after=settings.topology.warmup_rounds
        )
    except FAULTS as error:
        raise _blaming_topology(name, options, settings, error) from error
    algorithm = make_algorithm(config)
    try:
        algorithm.requires.check(topology, algorithm.describe())
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return topology


def make_algorithm(config: Mapping[str, Any]) -> Algorithm:
    """Build the configured gossip algorithm.

    Raises
    ------
    ConfigurationError
        The algorithm cannot be built.
    """
    made: Algorithm = _made(config, "algorithm", ALGORITHMS, Algorithm)
    return made


def _blaming_topology(
    name: str, options: Mapping[str, Any], settings: Settings, error: Exception
) -> ConfigurationError:
    """Build an error that names the option or the number of ranks that a topology family refuses."""
    text = " ".join(str(error).split())
    option = named_in(text, options)
    if option is not None:
        return ConfigurationError(f"topology.options.{option}={shown(options[option])}: {text}")
    ranks = f"launch.world_size={settings.launch.world_size}"
    if settings.launch.local_size > 1:
        ranks += f" launch.local_size={settings.launch.local_size}"
    cause = ranks if "world_size" in text else f"topology.name={name}"
    return ConfigurationError(f"{cause}: {text}")


def check(config: Mapping[str, Any], *, meanwhile: Callable[[], None] | None = None) -> Experiment:
    """Build everything once, so that user errors are found before any worker starts.

    Parameters
    ----------
    config : mapping
        As for :func:`build`.
    meanwhile : callable, optional
        Called after the quick checks and before the slow ones, to start slow work in the background.

    Raises
    ------
    ConfigurationError
        A part of the configuration cannot be built.
    """
    try:
        import_modules(config)
        check_targets(config)
        settings = Settings.from_config(config)
        make_topology(config, settings)
        options = wrapper_options(config)
        _checked(config, SECTION)
        check_wrapper_options(options, settings)
        logging_settings(config)
        if meanwhile is not None:
            meanwhile()
        experiment = build(config)
        module = experiment.make_module()
        check_values(experiment.wrapper_options, module)
        optimizer = experiment.make_optimizer(list(module.named_parameters()))
        experiment.make_scheduler(optimizer, experiment.total_steps)
        if experiment.topology is not None:
            prepare_algorithm(
                experiment.algorithm,
                experiment.topology,
                experiment.compression,
                (optimizer,),
                averages_buffers=options.get("buffers") == "average",
            )
        _check_model_takes_data(module, experiment.data)
    except ConfigurationError:
        raise
    except KeyError as error:
        raise ConfigurationError(f"the configuration has no key {error}; do not remove it") from error
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigurationError(" ".join(str(error).split())) from error
    return experiment


def import_modules(config: Mapping[str, Any]) -> None:
    """Import the modules listed under ``imports`` in the configuration.

    Raises
    ------
    ConfigurationError
        A module cannot be imported.
    """
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
    try:
        with torch.no_grad():
            logits = module.eval()(data.train_inputs[:2])
    except (RuntimeError, ValueError, IndexError) as error:
        first_line = str(error).splitlines()[0]
        is_text = data.train_inputs.dtype == torch.int64 and data.train_targets.ndim > 1
        remedy = "model=char_transformer takes text" if is_text else "choose another model=... or data=..."
        raise ConfigurationError(
            f"{type(module).__name__} cannot take the inputs of {data.name} ({data.train_inputs.dtype}, "
            f"{list(data.train_inputs.shape[1:])} a sample): {first_line}; {remedy}"
        ) from error
    if logits.shape != (*data.train_targets[:2].shape, data.num_classes):
        raise ConfigurationError(
            f"{type(module).__name__} gives outputs of shape {list(logits.shape)} for 2 samples of {data.name}, but "
            f"{[*data.train_targets[:2].shape, data.num_classes]} is needed; choose another model=... or data=..."
        )


def _factory(config: Mapping[str, Any], key: str, *, leaving_out: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the callable that ``config[key]["_target_"]`` names, bound to the other entries as keyword arguments.

    Calling it raises a ConfigurationError that names the option at fault.
    """
    section = _checked(config, key, leaving_out)
    factory = _instantiated(key, section)

    def make(*arguments: Any) -> Any:
        def works_without(option: str) -> bool:
            try:
                _instantiated(key, {name: value for name, value in section.items() if name != option})(*arguments)
            except FAULTS:
                return False
            return True

        try:
            return factory(*arguments)
        except ConfigurationError:
            raise
        except FAULTS as error:
            raise blaming(key, section, error, works_without) from error

    return make


def _made(config: Mapping[str, Any], key: str, registry: Registry[Callable[..., Any]], kind: type) -> Any:
    """Build the object that ``config[key]`` describes: by a registered name with its options, or by a target."""
    name, options = config[key].get("name"), config[key].get("options") or {}
    if config[key].get(TARGET) or name is None:
        made = _factory(config, key)()
        name = config[key][TARGET]
    else:
        make = registry.get(name)
        check_options(f"{key}.options", make, options)
        try:
            made = make(**options)
        except FAULTS as error:
            raise blaming(f"{key}.options", options, error, lambda _: False) from error
    if not isinstance(made, kind):
        raise ConfigurationError(
            f"{key}={name} makes a {type(made).__name__}, but a gossip.{kind.__name__} is needed; have its class "
            f"extend that"
        )
    return made


def _checked(config: Mapping[str, Any], key: str, leaving_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the section ``key`` after checking that its target is allowed and has these options, with these types."""
    section = {name: value for name, value in config[key].items() if name not in leaving_out}
    if not section.get(TARGET):
        raise ConfigurationError(f"{key} has no {TARGET}; choose one of the group's files, {key}=...")
    check_targets({key: section, OPTION: config.get(OPTION)})
    check_options(key, locate(f"{key}.{TARGET}", section[TARGET]), section)
    return section


def _instantiated(key: str, section: Mapping[str, Any]) -> Callable[..., Any]:
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        factory: Callable[..., Any] = instantiate({**section, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        raise ConfigurationError(
            f"{key}.{TARGET}={section[TARGET]} cannot be made: {error.__cause__ or error}"
        ) from error
    return factory
