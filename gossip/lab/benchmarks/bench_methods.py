"""The compared methods, each as one training step: no exchange, torch's DDP and hybrid sharding, Decent-DP, gossip."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import topologies
from gossip import ALGORITHMS, COMPRESSIONS, GossipDataParallel
from gossip.lab.benchmarks.workloads import Batch, loss_of
from gossip.lab.experiments.training_methods import grouped, shard_parts
from gossip.lab.experiments.validated_models import ConfigurationError, Model, nearest

MOMENTUM = 0.9
Optimize = Callable[[Any], torch.optim.Optimizer]
Options = Mapping[str, Any]
"""The options of a method besides the module: keyword arguments of the class that the method represents."""
_FSDP = "fsdp"
"""The value of ``shard`` that applies fully_shard to the module before it is wrapped."""
_WHOLE = "whole"
"""The value of ``shard`` with which each rank of a host holds the host's whole replica."""
_DDP_HOOKS: Mapping[str, Callable[..., Any]] = {
    # Under its own name, DistributedDataParallel refuses this hook without NCCL, although gloo can sum bfloat16 too.
    "bf16": lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket),
    "fp16": default_hooks.fp16_compress_hook,
}
_GIVEN = ("module", "model", "optimizer", "optim_fn")
"""The arguments of wrappers that are no options."""


class MethodSpecification(Model):
    """One row of the table: its label, and the method (a key of :data:`METHODS`) and its options."""

    label: str
    kind: str
    options: dict[str, Any]

    def start(self, module: nn.Module, optimizer: Optimize, timeout_s: float) -> Method:
        """Prepare the training of a module, by an optimizer that is made over parameters. Collective."""
        return METHODS[self.kind](module, optimizer, self.options, timedelta(seconds=timeout_s))


def _arguments_of(wrapper: type) -> dict[str, tuple[str, ...] | None]:
    return dict.fromkeys(name for name in inspect.signature(wrapper).parameters if name not in _GIVEN)


class Method(ABC):
    """A training method for one replica that communicates with the other replicas; this class makes plain steps.

    The time-out is that of any wait for other ranks.
    """

    options: ClassVar[Mapping[str, tuple[str, ...] | None]] = {}
    """The names of the options, with the values of those that have a few."""
    _updates_in_backward: ClassVar[bool] = False

    def __init__(self, module: nn.Module, optimizer: Optimize, options: Options, timeout: timedelta) -> None:
        self._module, self._optimize = module, optimizer
        self._group: dist.ProcessGroup | None = None
        self.model = self._wrapped(dict(options), timeout)
        self._optimizer = None if self._updates_in_backward else optimizer(module.parameters())

    @abstractmethod
    def _wrapped(self, options: dict[str, Any], timeout: timedelta) -> nn.Module:
        """Return the model to train. Collective."""

    def step(self, batch: Batch) -> torch.Tensor:
        """Make one local update with its communication, and return the loss.

        Ranks must make equal numbers of steps, unless asynchronous.
        """
        with record_function("forward"):
            loss = loss_of(self.model, batch)
        with record_function("backward"):
            loss.backward()
        if self._optimizer is not None:
            with record_function("update"):
                self._optimizer.step()
                self._optimizer.zero_grad()
        return loss.detach()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Hold the mean of all replicas within the block, and restore the replica's own values afterwards. Collective.

        The replicas of the ranks of a method's group, or their shards of replicas, are averaged, or those of all ranks.
        """
        module, group = self._module, self._group
        everything = [each.data for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()]
        tensors = [each.to_local() if isinstance(each, DTensor) else each for each in everything]
        saved = [tensor.clone() for tensor in tensors]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))
        try:
            yield
        finally:
            for tensor, values in zip(tensors, saved, strict=True):
                tensor.copy_(values)

    def close(self) -> None:
        """End communication; the module then holds this rank's replica."""
        del self.model


class Local(Method):
    """No exchange. With ``shard: fsdp`` the ranks of a host share a replica, which shows the cost of sharding alone."""

    options: ClassVar = {"shard": (_FSDP,)}

    def _wrapped(self, options: dict[str, Any], timeout: timedelta) -> nn.Module:  # noqa: ARG002
        if options.get("shard") == _FSDP:
            mesh = grouped(self._module, int(os.environ["LOCAL_WORLD_SIZE"]), _FSDP)["mesh"]
            self._group = mesh.get_group("gossip")
        return self._module


class AllReduce(Method):
    """torch's DistributedDataParallel with ``gradient_as_bucket_view``; option ``hook``: none, bf16 or fp16."""

    options: ClassVar = _arguments_of(DistributedDataParallel) | {"hook": tuple(_DDP_HOOKS)}

    def _wrapped(self, options: dict[str, Any], timeout: timedelta) -> nn.Module:  # noqa: ARG002
        hook = options.pop("hook", None)
        options = {"gradient_as_bucket_view": True, "broadcast_buffers": False, **options}
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # no other name is in every release
            model = DistributedDataParallel(self._module, **options)
        if hook is not None:
            model.register_comm_hook(None, _DDP_HOOKS[hook])
        return model


class FullSharding(Method):
    """torch's fully_shard over all ranks, which hold a single replica together."""

    _dimensions: ClassVar[tuple[str, ...] | None] = None

    def _wrapped(self, options: dict[str, Any], timeout: timedelta) -> nn.Module:  # noqa: ARG002
        world_size, local_size = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        shape = (world_size,) if self._dimensions is None else (world_size // local_size, local_size)
        kind = next(self._module.parameters()).device.type
        shard_parts(self._module, init_device_mesh(kind, shape, mesh_dim_names=self._dimensions))
        return self._module

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Do nothing: the replicas are equal."""
        yield


class HybridSharding(FullSharding):
    """torch's fully_shard on a 2-D mesh: sharded over the ranks of each host, all-reduced between hosts."""

    _dimensions = ("all", "one")


class DecentDP(Method):
    """Decent-DP's DistributedDataParallel, one rank per node (the extra ``bench``)."""

    _updates_in_backward = True

    def _wrapped(self, options: dict[str, Any], timeout: timedelta) -> nn.Module:  # noqa: ARG002
        from decent_dp.ddp import DecentralizedDataParallel

        options = {"_local_world_size": 1, **options}
        model: nn.Module = DecentralizedDataParallel(self._module, self._optimize, **options)
        return model

    def close(self) -> None:
        """Wait for pending communication and release process groups and hooks, since Decent-DP does neither itself."""
        model: Any = self.model
        for work in model._comm_ops:
            if work is not None:
                work.wait()
        for hook in [*getattr(model, "_trace_hooks", ()), *model._ddp_hooks]:
            hook.remove()
        groups = {id(group): group for group in model._topo._registry.values()}
        for group in groups.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        super().close()

    @classmethod
    def own_options(cls) -> dict[str, tuple[str, ...] | None]:
        """Return the wrapper's arguments, and the library's own names of topologies."""
        from decent_dp.ddp import DecentralizedDataParallel
        from decent_dp.topo import TopologyReg

        return _arguments_of(DecentralizedDataParallel) | {"topology": tuple(TopologyReg.registry)}


class Gossip(Method):
    """Training with :class:`gossip.GossipDataParallel`."""

    options: ClassVar = _arguments_of(GossipDataParallel) | {"shard": (_WHOLE, "optimizer", _FSDP)}
    _updates_in_backward = True
    model: GossipDataParallel

    def _wrapped(self, options: dict[str, Any], timeout: timedelta) -> nn.Module:
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        arguments = gossip_arguments(options, dist.get_world_size(), local_size)
        if (shard := arguments.pop("shard", None)) is not None:
            # In a benchmark's options, "none" means that the option is not given.
            arguments |= grouped(self._module, local_size, "none" if shard == _WHOLE else shard)
        return GossipDataParallel(self._module, self._optimize, timeout=timeout, **arguments)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        with self.model.averaged():
            yield

    def close(self) -> None:
        """Wait for messages in flight, and discard them."""
        self.model.close()


METHODS: dict[str, type[Method]] = {
    "local": Local,
    "ddp": AllReduce,
    "fsdp": FullSharding,
    "hsdp": HybridSharding,
    "decent_dp": DecentDP,
    "gossip": Gossip,
}
"""The methods: the next one is a class and a row here."""


def decent_dp_is_installed() -> bool:
    """Return whether Decent-DP, from the extra ``bench``, is installed."""
    return importlib.util.find_spec("decent_dp") is not None


def expand(methods: Any, world_size: int, local_size: int = 1) -> tuple[MethodSpecification, ...]:
    """Return one row per combination of the values of options that are lists.

    Parameters
    ----------
    methods : mapping
        A mapping of names to options. The option ``method`` is a key of :data:`METHODS`, by default the name, and
        ``label`` lists the names of the rows, made of the options where it has another number; all other options are
        keyword arguments. If an option is a list, each of its values gets a row. The value "none" omits an option.
        A method whose library is not installed is left out with a warning.
    world_size, local_size : int
        The number of all ranks, and the number of ranks on each host.

    Raises a ConfigurationError if no method is left, or a method or option does not exist or cannot be used.

    Examples
    --------
    >>> [row.label for row in expand({"local": {}, "gossip": {"topology": ["ring", "complete"]}}, 4)]
    ['local', 'gossip ring', 'gossip complete']
    >>> [row.label for row in expand({"ddp": {"hook": ["none", "bf16"], "label": ["ddp", "ddp, bf16 hook"]}}, 4)]
    ['ddp', 'ddp, bf16 hook']
    """
    if not isinstance(methods, Mapping) or not methods:
        raise ConfigurationError(f"methods must map names to options, got {methods!r}; try bench/methods=main")
    rows: list[MethodSpecification] = []
    for name, given in methods.items():
        if not isinstance(given, Mapping | None):
            raise ConfigurationError(f"methods.{name} must be a mapping of options, got {given!r}")
        options = dict(given or {})
        kind, labels = str(options.pop("method", name)), options.pop("label", None)
        if kind == "decent_dp" and not decent_dp_is_installed():
            logger.warning(
                "{} is left out: it is not installed; in a clone of the repository: pip install '.[bench]'", kind
            )
            continue
        choices = {key: value if isinstance(value, list) else [value] for key, value in options.items()}
        for key, choice in choices.items():
            if not choice:
                raise ConfigurationError(f"methods.{name}.{key} is an empty list; give it at least one value, or none")
        combinations = list(itertools.product(*choices.values()))
        for number, values in enumerate(combinations):
            row = dict(zip(choices, values, strict=True))
            words = [_words(key, value) for key, value in row.items() if len(choices[key]) > 1]
            chosen = {key: value for key, value in row.items() if value not in (None, "none")}
            _check(kind, chosen, world_size, local_size)
            is_named = isinstance(labels, list) and len(labels) == len(combinations)
            label = str(labels[number]) if is_named else " ".join([str(name), *filter(None, words)])
            rows.append(MethodSpecification(label=label, kind=kind, options=chosen))
    if not rows:
        raise ConfigurationError("no method of methods is installed; add another, such as ddp={}")
    return tuple(rows)


def _words(option: str, value: Any) -> str:
    if value in (None, "none"):
        return ""
    if isinstance(value, Mapping):
        return " ".join(str(entry) for entry in value.values())
    unit = " MiB" if option in ("bucket_cap_mb", "bucket_size_in_mb") else ""
    return f"{value}{unit}" if isinstance(value, str) or unit else f"{option}={value}"


def _check(kind: str, options: Options, world_size: int, local_size: int) -> None:
    """Refuse invalid options of a method before any worker starts."""
    if kind not in METHODS:
        raise ConfigurationError(
            f"there is no method {kind}{nearest(kind, list(METHODS))} Available: {', '.join(sorted(METHODS))}"
        )
    allowed = DecentDP.own_options() if kind == "decent_dp" else METHODS[kind].options
    for name, value in options.items():
        if name not in allowed:
            available = f" Available: {', '.join(sorted(allowed))}" if allowed else " It takes none."
            raise ConfigurationError(f"{kind} has no option {name}{nearest(name, list(allowed))}{available}")
        if value not in (allowed[name] or (value,)):
            names = ", ".join(allowed[name] or ())
            raise ConfigurationError(f"{kind}: {name} must be none, {names}, got {value!r}")
    if kind == "gossip":
        try:
            gossip_arguments(options, world_size, local_size)
            arguments = gossip_arguments({key: value for key, value in options.items() if key != "shard"}, 1)
            GossipDataParallel(nn.Linear(1, 1), sgd(0.1), **arguments).close()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{kind}: {error}") from error


def gossip_arguments(options: Options, world_size: int, local_size: int = 1) -> dict[str, Any]:
    """Build the wrapper's keyword arguments; topology, algorithm and compression are names, or ``name`` with options.

    The options of a topology include ``every``, the number of steps from one exchange to the next, and the ``order`` of
    the ranks. With ``shard``, the ranks of the topology are the hosts. Raises a TypeError or ValueError for a name that
    is not registered, and for an option that does not exist or has an invalid value.
    """
    if "shard" in options:
        world_size //= local_size
    name, given = _name_and_options("topology", options.get("topology", "one_peer_exponential"))
    every, order = given.pop("every", 1), given.pop("order", None)
    topology = topologies.build(name, world_size, **given).every(every)
    arguments = {**options, "topology": topology if order is None or world_size == 1 else topology.permuted(order)}
    for option, registry in (("algorithm", ALGORITHMS), ("compression", COMPRESSIONS)):
        if option in options:
            name, given = _name_and_options(option, options[option])
            arguments[option] = registry.get(name)(**given)
    return arguments


def _name_and_options(option: str, wanted: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(wanted, str):
        return wanted, {}
    if not isinstance(wanted, Mapping) or "name" not in wanted:
        raise ValueError(f"{option} must be a name, or a mapping of name and options, got {wanted!r}")
    return wanted["name"], {key: value for key, value in wanted.items() if key != "name"}


def sgd(learning_rate: float) -> Optimize:
    """Return the optimizer of the models of :mod:`.workloads`, with any method: SGD with momentum."""
    return functools.partial(torch.optim.SGD, lr=learning_rate, momentum=MOMENTUM)
