"""The compared methods, each as one training step: no exchange, torch's DDP and hybrid sharding, Decent-DP, gossip."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import topologies
from gossip import ALGORITHMS, COMPRESSIONS, GossipDataParallel, make_shard_mesh
from gossip.lab.benchmarks.bench_models import Batch, loss_of
from gossip.lab.benchmarks.ddp_hooks import bf16_hook
from gossip.lab.benchmarks.replica_means import averaged
from gossip.lab.experiments.validated_models import ConfigurationError, nearest

MOMENTUM = 0.9
Options = Mapping[str, Any]
"""The options of a method besides the module: keyword arguments of the class that the method represents."""
_FSDP = "fsdp"
"""The value of ``shard`` that applies fully_shard to the module before it is wrapped."""
_WHOLE = "whole"
"""The value of ``shard`` with which each rank of a host holds the host's whole replica."""
_SHARDS = (_WHOLE, "optimizer", _FSDP)
_DDP_HOOKS: Mapping[str, Callable[..., Any]] = {"bf16": bf16_hook, "fp16": default_hooks.fp16_compress_hook}


class Method(Protocol):
    """A training method for one replica that communicates with the other replicas. Construction is collective."""

    def step(self, batch: Batch) -> None:
        """Make one local update with its communication. Every rank must make the same number of steps."""

    def exposed_wait_s(self) -> float | None:
        """Return how long the newest step was blocked waiting for peers, or None if the method does not report it."""

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which the module holds the mean of all replicas. Collective."""

    def close(self) -> None:
        """End communication; the module then holds this rank's replica."""


class Local:
    """No exchange. With ``shard: fsdp`` the ranks of a host share a replica, which shows the cost of sharding alone."""

    def __init__(self, module: nn.Module, learning_rate: float, options: Options, timeout: timedelta) -> None:  # noqa: ARG002
        self._group: dist.ProcessGroup | None = None
        if options.get("shard") == _FSDP:
            mesh = make_shard_mesh(int(os.environ["LOCAL_WORLD_SIZE"]), "cpu")
            self._group = mesh.get_group("gossip")
            _shard(module, mesh["shard"])
        self._module = module
        self._optimizer = make_optimizer(learning_rate, module.parameters())

    def step(self, batch: Batch) -> None:
        """Run the plain training loop's step."""
        loss_of(self._module, batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def exposed_wait_s(self) -> float | None:
        """Return 0: there are no peers to wait for."""
        return 0.0

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Average parameters and buffers within the block."""
        return averaged(self._module, self._group)

    def close(self) -> None:
        """Do nothing: there is no communication to end."""


class AllReduce:
    """torch's DistributedDataParallel with ``gradient_as_bucket_view``; option ``hook``: none, bf16 or fp16."""

    def __init__(self, module: nn.Module, learning_rate: float, options: Options, timeout: timedelta) -> None:  # noqa: ARG002
        arguments = {"gradient_as_bucket_view": True, "broadcast_buffers": False, **options}
        hook = arguments.pop("hook", None)
        self._module = module
        self._model = DistributedDataParallel(module, **arguments)
        if hook is not None:
            self._model.register_comm_hook(None, _DDP_HOOKS[hook])
        self._optimizer = make_optimizer(learning_rate, self._model.parameters())

    def step(self, batch: Batch) -> None:
        """Run the plain training loop's step."""
        loss_of(self._model, batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def exposed_wait_s(self) -> float | None:
        """Return None: DDP does not report waiting times."""
        return None

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Average parameters and buffers within the block."""
        return averaged(self._module)

    def close(self) -> None:
        """Delete the wrapper, and its hooks with it."""
        del self._model


class DecentDP:
    """Decent-DP's DistributedDataParallel, one rank per node (the extra ``bench``)."""

    def __init__(self, module: nn.Module, learning_rate: float, options: Options, timeout: timedelta) -> None:  # noqa: ARG002
        from decent_dp.ddp import DecentralizedDataParallel

        optimize = functools.partial(make_optimizer, learning_rate)
        self._module = module
        self._model = DecentralizedDataParallel(module, optimize, **{"_local_world_size": 1, **options})

    def step(self, batch: Batch) -> None:
        """Run forward and backward; updates and exchanges happen in the backward pass."""
        loss_of(self._model, batch).backward()

    def exposed_wait_s(self) -> float | None:
        """It does not tell."""
        return None

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Average parameters and buffers within the block."""
        return averaged(self._module)

    def close(self) -> None:
        """Wait for pending communication and release process groups and hooks, since Decent-DP does neither itself."""
        for work in self._model._comm_ops:
            if work is not None:
                work.wait()
        for hook in [*getattr(self._model, "_trace_hooks", ()), *self._model._ddp_hooks]:
            hook.remove()
        groups = {id(group): group for group in self._model._topo._registry.values()}
        for group in groups.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        del self._model


class Gossip:
    """Training with :class:`gossip.GossipDataParallel`."""

    def __init__(self, module: nn.Module, learning_rate: float, options: Options, timeout: timedelta) -> None:
        optimize = functools.partial(make_optimizer, learning_rate)
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        arguments = gossip_arguments(options, dist.get_world_size(), local_size)
        if arguments.get("shard") is not None:
            arguments["mesh"] = make_shard_mesh(local_size, "cpu")
            if arguments["shard"] == _FSDP:
                del arguments["shard"]
                _shard(module, arguments["mesh"]["shard"])
            elif arguments["shard"] == _WHOLE:
                arguments["shard"] = "none"  # in a benchmark's options, "none" means that the option is not given
        self._model = GossipDataParallel(module, optimize, timeout=timeout, **arguments)

    def step(self, batch: Batch) -> None:
        """Run forward and backward; updates and exchanges happen in the backward pass."""
        loss_of(self._model, batch).backward()

    def exposed_wait_s(self) -> float | None:
        """Return the exposed wait that the wrapper measured."""
        stats = self._model.stats()
        return None if stats is None else stats.exposed_wait_s

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Return :meth:`gossip.GossipDataParallel.averaged`."""
        return self._model.averaged()

    def close(self) -> None:
        """Wait for messages in flight, and discard them."""
        self._model.close()


class HybridSharding:
    """torch's fully_shard on a 2-D mesh: sharded over the ranks of each host, all-reduced between hosts."""

    def __init__(self, module: nn.Module, learning_rate: float, options: Options, timeout: timedelta) -> None:  # noqa: ARG002
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        mesh = init_device_mesh("cpu", (dist.get_world_size() // local_size, local_size), mesh_dim_names=("all", "one"))
        self._module = _shard(module, mesh)
        self._optimizer = make_optimizer(learning_rate, module.parameters())

    def step(self, batch: Batch) -> None:
        """Run the plain training loop's step."""
        loss_of(self._module, batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def exposed_wait_s(self) -> float | None:
        """It does not tell."""
        return None

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing within the block: the replicas are equal."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Do nothing: the hooks are deleted with the module."""


def _shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each linear layer, and then the remaining parameters."""
    for layer in [part for part in module.modules() if isinstance(part, nn.Linear)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


METHODS: dict[str, Callable[[nn.Module, float, Options, timedelta], Method]] = {
    "local": Local,
    "ddp": AllReduce,
    "hsdp": HybridSharding,
    "decent_dp": DecentDP,
    "gossip": Gossip,
}


def decent_dp_is_installed() -> bool:
    """Return whether Decent-DP, from the extra ``bench``, is installed."""
    return importlib.util.find_spec("decent_dp") is not None


def check(kind: str, options: Options, world_size: int, local_size: int = 1) -> None:
    """Refuse invalid options of a method before any worker starts.

    Raises
    ------
    ConfigurationError
        The method or an option does not exist, or an option's value cannot be used.
    """
    if kind not in METHODS:
        raise ConfigurationError(f"there is no method {kind}{nearest(kind, list(METHODS))} Available: {_list(METHODS)}")
    if kind == "local":
        _check_names(kind, options, ("shard",))
        if options.get("shard") not in (None, _FSDP):
            raise ConfigurationError(f"local: shard must be none or {_FSDP}, got {options['shard']!r}")
    elif kind == "hsdp":
        _check_names(kind, options, ())
    elif kind == "ddp":
        _check_names(kind, options, ("hook", *_keywords(DistributedDataParallel)))
        if options.get("hook") not in (None, *_DDP_HOOKS):
            raise ConfigurationError(f"ddp: hook must be none, {_list(_DDP_HOOKS)}, got {options['hook']!r}")
    elif kind == "decent_dp":
        _check_decent_dp(options)
    else:
        _check_names(kind, options, _keywords(GossipDataParallel))
        try:
            gossip_arguments(options, world_size, local_size)
            arguments = gossip_arguments({key: value for key, value in options.items() if key != "shard"}, 1)
            GossipDataParallel(nn.Linear(1, 1), functools.partial(torch.optim.SGD, lr=0.1), **arguments).close()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"gossip: {error}") from error


def _check_decent_dp(options: Options) -> None:
    if not decent_dp_is_installed():
        return
    from decent_dp.ddp import DecentralizedDataParallel
    from decent_dp.topo import TopologyReg

    _check_names("decent_dp", options, _keywords(DecentralizedDataParallel))
    topology = options.get("topology", "complete")
    if topology not in TopologyReg.registry:
        raise ConfigurationError(
            f"decent_dp: there is no topology {topology!r}. Available: {_list(TopologyReg.registry)}"
        )


def _check_names(kind: str, options: Options, allowed: tuple[str, ...]) -> None:
    for name in options:
        if name not in allowed:
            available = f" Available: {_list(allowed)}" if allowed else " It takes none."
            raise ConfigurationError(f"{kind} has no option {name}{nearest(name, allowed)}{available}")


def _keywords(wrapper: type) -> tuple[str, ...]:
    """Return the names of the keyword arguments besides the module and the optimizer."""
    parameters = inspect.signature(wrapper.__init__).parameters  # type: ignore[misc]
    return tuple(name for name in parameters if name not in ("self", "module", "model", "optimizer", "optim_fn"))


def gossip_arguments(options: Options, world_size: int, local_size: int = 1) -> dict[str, Any]:
    """Build the wrapper's keyword arguments; topology, algorithm and compression are names, or ``name`` with options.

    The options of a topology include ``every``, the number of steps from one exchange to the next. With ``shard``,
    the ranks of the topology are the hosts.

    Raises
    ------
    TypeError, ValueError
        A name is not registered, or an option does not exist or has an invalid value.
    """
    if "shard" in options:
        if options["shard"] not in _SHARDS:
            raise ValueError(f"shard must be none, {_list(_SHARDS)}, got {options['shard']!r}")
        world_size //= local_size
    name, given = _name_and_options("topology", options.get("topology", "one_peer_exponential"))
    every = given.pop("every", 1)
    arguments = {**options, "topology": topologies.build(name, world_size, **given).every(every)}
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


def make_optimizer(learning_rate: float, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer that every method uses: SGD with momentum."""
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=MOMENTUM)


def _list(names: Any) -> str:
    return ", ".join(sorted(names))
