"""The wrapper's arguments, checked before anything is built."""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import topologies
from gossip.algorithms import VALUES, Algorithm, Kept, resolve_algorithm
from gossip.communication.membership import Membership
from gossip.compression.codec import Compression
from gossip.compression.value_codecs import Cast, Uncompressed
from gossip.exchange.clipping import check_clipping, check_max_difference
from gossip.exchange.exchanges import UsesExchange
from gossip.exchange.transport import SoftDeadline, TransportFactory
from gossip.exchange.transport_names import name_of, resolve_transport
from gossip.optimizers.bucket_optimizer import OptimizerArgument, requires_closure
from gossip.optimizers.scopes import Scope, known_scope_of
from gossip.parameters.buckets import check_dense
from gossip.parameters.names import named_parameters
from topologies import Topology

_NOT_NEEDED = {
    "device_ids": "the module trains on the device on which its parameters are",
    "output_device": "outputs are on the device on which the module makes them",
    "find_unused_parameters": "a parameter without a gradient is not updated, but it is mixed",
    "gradient_as_bucket_view": "the parameters lie in buckets, and no gradient is copied there",
    "static_graph": "buckets are sent in one order, whatever the graph",
    "broadcast_buffers": 'buffers="local", the default, leaves each rank its own, and buffers="average" mixes them',
    "delay_all_reduce_named_params": "a bucket is sent as soon as its own parameters are updated",
    "init_sync": "rank 0's parameters and buffers are always broadcast",
    "skip_all_reduce_unused_params": "nothing is reduced; a parameter without a gradient is still mixed",
}

OF_DDP = {name: f"is not needed: {why}; leave it out" for name, why in _NOT_NEEDED.items()} | {
    "mixed_precision": "is of DistributedDataParallel; compute under torch.autocast, or pass scaler",
    "device_mesh": "is of DistributedDataParallel; pass mesh=gossip.make_shard_mesh(local_size) or process_group",
    "lr": "is the optimizer's; pass optimizer=functools.partial(torch.optim.SGD, lr=...)",
}
"""Arguments of DistributedDataParallel and of others, and what to do instead."""


@dataclass(frozen=True)
class Arguments:
    """How a model updates and exchanges; see :class:`gossip.GossipDataParallel` for each."""

    optimizer: OptimizerArgument
    topology: str | Topology
    algorithm: str | Algorithm
    compression: str | Compression | None
    step_in_backward: bool
    clip_grad_norm: float | None
    clip: str
    scaler: GradScaler | None
    buffers: str
    bucket_cap_mb: float
    transport: str | TransportFactory
    on_peer_loss: str = "raise"
    min_ranks: int | None = None
    fallback_topology: str = "base"
    soft_deadline: timedelta | float | Literal["auto"] | None = None
    partition_timeout: timedelta | float | None = None
    authenticate: bool = True
    record: str | Path | None = None
    mesh: DeviceMesh | None = None
    shard: str | None = None
    max_difference: str | float | None = "warn"
    on_preemption: Callable[[Any], object] | None = None

    @property
    def continues(self) -> bool:
        """Whether the ranks continue without those that are lost."""
        return self.on_peer_loss == "continue"

    @property
    def is_asynchronous(self) -> bool:
        """Whether the ranks make their steps independently; False too if there is no such algorithm."""
        with contextlib.suppress(ValueError, TypeError):
            return resolve_algorithm(self.algorithm).is_asynchronous
        return False

    @property
    def soft_deadline_s(self) -> SoftDeadline:
        """The soft deadline in seconds, or "auto"."""
        return self.soft_deadline if isinstance(self.soft_deadline, str) else _in_seconds(self.soft_deadline)

    @property
    def partition_timeout_s(self) -> float | None:
        """The partition time-out in seconds."""
        return _in_seconds(self.partition_timeout)

    @property
    def open_scaler(self) -> GradScaler | None:
        """The scaler, if there is one and it is enabled."""
        return self.scaler if self.scaler is not None and self.scaler.is_enabled() else None

    @property
    def updates_by_bucket(self) -> bool:
        """Whether each bucket is updated as soon as its own gradients are complete."""
        waits = self.open_scaler is not None or (self.clip_grad_norm is not None and self.clip == "global")
        return self.step_in_backward and not waits

    @property
    def replica(self) -> str:
        """Who holds a replica, in words."""
        if self.mesh is None:
            return "one rank's"
        return f"a group's, with {'fully_shard' if self.shard is None else f'shard={self.shard!r}'}"

    def describe(self) -> dict[str, str]:
        """Return the settings that are not described elsewhere, in words, to be compared between ranks."""
        soft = self.soft_deadline_s
        described = {
            "step_in_backward": str(self.step_in_backward),
            "clip_grad_norm": "none" if self.clip_grad_norm is None else f"{self.clip_grad_norm:g} ({self.clip})",
            "buffers": self.buffers,
            "bucket_cap_mb": f"{self.bucket_cap_mb:g}",
            "transport": name_of(self.transport),
            "on_peer_loss": self.on_peer_loss
            + (f" (min_ranks={self.min_ranks}, {self.fallback_topology})" if self.continues else ""),
            "soft_deadline": f"{soft:g} s" if isinstance(soft, float | int) else soft or "none",
            "max_difference": str(self.max_difference),
            "on_preemption": "none" if self.on_preemption is None else "given",
        }
        scaler = self.open_scaler
        if scaler is None:
            return described | {"scaler": "none"}
        state = scaler.state_dict()
        constants = ("scale", "growth_factor", "backoff_factor", "growth_interval")
        return described | {"scaler": ", ".join(f"{name}={state[name]:g}" for name in constants)}


def _in_seconds(given: timedelta | float | None) -> float | None:
    return given.total_seconds() if isinstance(given, timedelta) else given


def check_arguments(arguments: Arguments, module: nn.Module) -> None:
    """Refuse values that are out of range, and combinations that cannot work."""
    check_update(arguments.clip, arguments.clip_grad_norm, arguments.buffers, arguments.bucket_cap_mb)
    check_max_difference(arguments.max_difference)
    resolve_transport(arguments.transport)
    _check_peer_loss(arguments)
    if arguments.clip_grad_norm is not None:
        if not arguments.step_in_backward:
            raise ValueError(
                f"clip_grad_norm={arguments.clip_grad_norm} is for steps in backward; with step_in_backward=False call "
                "model.clip_grad_norm_(...) before model.optimizer.step()"
            )
        check_dense(module, "and sparse gradients cannot be clipped to clip_grad_norm")
    if not isinstance(arguments.scaler, GradScaler | None):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(arguments.scaler).__name__}")
    if arguments.open_scaler is not None and arguments.step_in_backward:
        for name, parameter in named_parameters(module):
            if parameter.dtype == torch.float16 and parameter.requires_grad:
                raise ValueError(
                    f"scaler: parameter {name!r} is float16, whose gradients a GradScaler cannot unscale; keep the "
                    "parameters in float32 and compute under torch.autocast"
                )


def refuse_any(refused: Mapping[str, object], sentence: str = "{}") -> None:
    """Raise ValueError with the first text whose condition holds, in its place in the sentence."""
    for text, holds in refused.items():
        if holds:
            raise ValueError(sentence.format(text))


def check_mesh_arguments(arguments: Arguments) -> None:
    """Refuse what does not go with groups of ranks that train a replica together."""
    has_mesh, shard = arguments.mesh is not None, arguments.shard
    if shard is not None:
        check_choice("shard", shard, ("optimizer", "none"))
    is_built = arguments.optimizer is not None and not callable(arguments.optimizer)
    refuse_any(
        {
            f'shard="{shard}" needs mesh, which says which ranks share a replica; pass '
            "mesh=gossip.make_shard_mesh(local_size)": shard is not None and not has_mesh,
            "optimizer must be a function that builds it, since each rank of mesh trains its part of every parameter, "
            f"got {type(arguments.optimizer).__name__}; pass for example "
            "functools.partial(torch.optim.AdamW, lr=0.001)": has_mesh and shard != "none" and is_built,
            "algorithm asynchronous cannot be combined with mesh: the shards of a replica would be averaged at "
            "different times; choose another algorithm": has_mesh and arguments.is_asynchronous,
            "partition_timeout cannot be combined with mesh: the ranks of a shard group come back together, in new "
            "processes; leave it out": has_mesh and arguments.partition_timeout is not None,
            "record cannot be combined with mesh, because virtual workers have no shard groups; leave it out": (
                has_mesh and arguments.record is not None
            ),
            'soft_deadline cannot be combined with shard="none": the ranks of a group would mix parts of a message at '
            'different times, and their replicas would differ; leave it out, or pass shard="optimizer"': (
                has_mesh and shard == "none" and arguments.soft_deadline is not None
            ),
        }
    )


def _check_peer_loss(arguments: Arguments) -> None:
    check_choice("on_peer_loss", arguments.on_peer_loss, ("raise", "continue"))
    if not arguments.continues:
        for name in ("min_ranks", "soft_deadline", "partition_timeout", "authenticate", "on_preemption", "record"):
            value = getattr(arguments, name)
            if value is not None and value is not True:
                raise ValueError(
                    f'{name}={value} is for on_peer_loss="continue"; with "raise" all ranks wait for each other, over '
                    "torch.distributed, and the first loss of a rank ends the training; leave it out"
                )
        return
    if arguments.on_preemption is not None and not callable(arguments.on_preemption):
        raise TypeError(
            "on_preemption must be a function that takes the model and saves it, such as lambda model: "
            f"gossip.save(model, 'checkpoints'), got {arguments.on_preemption!r}"
        )
    what = "number of seconds, or timedelta"
    if arguments.soft_deadline_s not in (None, "auto"):
        check_positive("soft_deadline", arguments.soft_deadline_s, f'{what}, or "auto"')
    if arguments.partition_timeout_s is not None:
        check_positive("partition_timeout", arguments.partition_timeout_s, what)
    refuse_any(
        {
            'on_peer_loss="continue" has a transport of its own, but transport is '
            f"{name_of(arguments.transport)!r}; leave it out": arguments.transport != "distributed",
            "fallback_topology must be one of topologies.available(), got "
            f"{arguments.fallback_topology!r}": arguments.fallback_topology not in topologies.available(),
        }
    )


def check_update(clip: str, clip_grad_norm: float | None, buffers: str, bucket_cap_mb: float) -> None:
    """Refuse values of those arguments that virtual workers have as well."""
    check_choice("clip", clip, ("global", "bucket"))
    check_choice("buffers", buffers, ("local", "average"))
    check_positive("bucket_cap_mb", bucket_cap_mb, "number of MiB")
    if not math.isfinite(bucket_cap_mb):
        raise ValueError(f"bucket_cap_mb must be finite, got {bucket_cap_mb}; sys.maxsize has the effect of inf")
    if clip_grad_norm is not None:
        check_positive("clip_grad_norm", clip_grad_norm, "norm")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a value that is none of ``choices``."""
    if value not in choices:
        allowed = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


@contextlib.contextmanager
def told_by_rank_0() -> Iterator[None]:
    """Drop warnings within the block on other ranks than 0, where all would issue the same."""
    with warnings.catch_warnings():
        if os.environ.get("RANK", "0") != "0":
            warnings.simplefilter("ignore")
        yield


def resolve_topology(topology: str | Topology, world_size: int) -> Topology:
    """Return ``topology`` itself, or the one of that name for ``world_size`` ranks."""
    if isinstance(topology, str):
        with told_by_rank_0():
            topology = topologies.build(topology, world_size)
    if not isinstance(topology, Topology):
        raise TypeError(f"topology must be a name or a topologies.Topology, got {type(topology).__name__}")
    if topology.world_size != world_size:
        raise ValueError(
            f"topology {topology.name!r} is for {topology.world_size} ranks, but there are {world_size}; "
            f"build it with world_size={world_size}"
        )
    return topology


def prepare_algorithm(
    algorithm: Algorithm,
    topology: Topology,
    compression: Compression,
    optimizers: tuple[Optimizer, ...],
    *,
    averages_buffers: bool,
) -> Algorithm:
    """Return the algorithm bound to the topology.

    Algorithms, topologies, compressions and optimizers that cannot work together are refused.
    """
    for name, how in algorithm.keeps.items():
        if not isinstance(how, Kept):
            raise TypeError(
                f"algorithm {algorithm.describe()}: keeps[{name!r}] must say what becomes of this state when the ranks "
                f'change, as gossip.Kept("mean" or "zero", "joint", "own" or "common"), got {how!r}'
            )
    what, encoding = f"algorithm {algorithm.describe()}", f"compression {compression.describe()}"
    algorithm.requires.check(topology, algorithm.describe())
    algorithm.check_optimizers(optimizers)
    if algorithm.compression is not None and not isinstance(compression, Uncompressed):
        raise ValueError(
            f"{what} encodes its messages itself, and cannot be combined with {encoding}; choose compression=None"
        )
    compression.check(algorithm.schedule(topology))
    is_doubly = topology.stochasticity == "doubly"
    reader, with_closure = _reader(optimizers), [type(each).__name__ for each in optimizers if requires_closure(each)]
    refuse_any(
        {
            f"{encoding} delivers a part of a difference at a time, with which {what} diverges; choose int8 or int4, "
            'or algorithm="integral_correction", whose gain is adapted to it': algorithm.requires.prompt
            and compression.delivers < 1,
            f"{encoding} cannot serve {what}, which must know what was sent; choose none, bf16, fp16, int8 or "
            "int4": algorithm.weighs_by is not None and not compression.shows_messages,
            f"{encoding} cannot serve {reader}: its pre_average_hook needs what every rank sent, but these messages "
            "only contain what has changed along an edge; choose none, bf16, fp16, int8 or int4, or an optimizer "
            "without the hook": reader and not compression.shows_messages,
            f'buffers="average" needs a doubly stochastic topology, but {topology.name!r} is only '
            f"{topology.stochasticity}-stochastic, and nothing corrects buffers for it; choose "
            'buffers="local"': averages_buffers and not is_doubly,
            f"{what} replaces each gradient, but {', '.join(with_closure)} evaluates its closure several times per "
            "step; choose another algorithm or optimizer": algorithm.directs and with_closure,
        }
    )
    return algorithm.on(topology, compression.delivers)


def resized_or(
    fallback: str,
    topology: Topology,
    world_size: int,
    bound: Callable[[Topology], Algorithm],
    on_fallback: Callable[[Exception], None] = lambda _: None,
) -> tuple[Topology, Algorithm]:
    """Return a topology for another number of ranks, or the fallback if it cannot serve them, and what is bound to it.

    ``bound`` raises ValueError or TypeError too if its algorithm cannot use the topology.
    """
    try:
        resized = topology.resized(world_size)
        return resized, bound(resized)
    except (ValueError, TypeError) as error:
        on_fallback(error)
        resized = topologies.build(fallback, world_size)
        return resized, bound(resized)


def _reader(optimizers: Sequence[Optimizer]) -> str:
    """Return the type of an optimizer that is shown what was communicated; empty if there is none."""
    return next((type(optimizer).__name__ for optimizer in optimizers if isinstance(optimizer, UsesExchange)), "")


def check_combination(
    arguments: Arguments, algorithm: Algorithm, compression: Compression, optimizers: tuple[Optimizer, ...]
) -> None:
    """Refuse algorithms, compressions and optimizers that do not work with the other settings."""
    if not optimizers and not arguments.step_in_backward:
        raise ValueError("step_in_backward=False needs an optimizer whose step() makes the steps; pass one")
    what, reader = f"algorithm {algorithm.describe()}", _reader(optimizers)
    if algorithm.directs and len(optimizers) > 1 and not arguments.step_in_backward:
        raise ValueError(
            f"step_in_backward=False: {what} replaces the gradients of all {len(optimizers)} optimizers before the "
            "first one steps, when nobody has unscaled or checked those of the others; pass one optimizer, or leave it "
            "out"
        )
    needs_message = algorithm.numbers or algorithm.reads_sent or algorithm.compression is not None
    if arguments.shard == "none":
        why = "the whole message that a rank has sent, but each rank of a group sends a part of it; choose another"
        refuse_any(
            {
                f'shard="none": {what} needs {why} algorithm, or shard="optimizer"': needs_message
                or algorithm.requires.stochastic != "doubly",
                f'shard="none": {reader} has a pre_average_hook, which needs {why} optimizer': reader,
            }
        )
    elif arguments.mesh is not None:
        _check_divided(optimizers, arguments.shard)
    if algorithm.is_asynchronous:
        _check_asynchronous(arguments, algorithm, compression, optimizers)
    elif arguments.soft_deadline_s is not None:
        mixes_as_ever = type(algorithm).arrive is Algorithm.arrive and algorithm.sends == (VALUES,)
        refuse_any(
            {
                f"soft_deadline: messages of compression {compression.describe()} can be decoded only in their own "
                "step; choose none, bf16 or fp16, or no "
                "soft_deadline": not isinstance(compression, Uncompressed | Cast),
                f"soft_deadline: {what} needs all messages of a step at once, beyond mixing them; choose "
                '"adapt_while_communicating" or "adapt_then_combine", or no '
                "soft_deadline": not mixes_as_ever or needs_message,
                f"soft_deadline: {reader} has a pre_average_hook, which needs all messages of a step together; choose "
                "another optimizer, or no soft_deadline": reader,
            }
        )
    has_soft_deadline = arguments.soft_deadline_s is not None
    check_clipping(arguments.max_difference, algorithm, compression, has_soft_deadline=has_soft_deadline)


def _check_asynchronous(
    arguments: Arguments, algorithm: Algorithm, compression: Compression, optimizers: tuple[Optimizer, ...]
) -> None:
    """Refuse settings that do not work if ranks do not make their steps together."""
    what, reader = f"algorithm {algorithm.describe()}", _reader(optimizers)
    refuse_any(
        {
            f"{what} averages with any rank that is ready, over connections that survive the loss of a rank; pass "
            f'on_peer_loss="continue", got "{arguments.on_peer_loss}"': not arguments.continues,
            f"{what} sends uncompressed values and differences, got compression {compression.describe()}; leave it "
            "out": not isinstance(compression, Uncompressed),
            f"{what} waits max_staleness steps for a peer, got a soft_deadline as well; leave it "
            "out": arguments.soft_deadline_s is not None,
            f"{what}: a loss scale needs steps that all ranks make together, got a GradScaler; train in bfloat16 or "
            "float32": arguments.open_scaler is not None,
            f"{what} has no round that {reader}'s pre_average_hook could be shown; choose another optimizer, or "
            "another algorithm": reader,
        }
    )


def _check_divided(optimizers: tuple[Optimizer, ...], shard: str | None) -> None:
    """Refuse optimizers that need more of a replica than a rank of a group has."""
    for optimizer in optimizers:
        scope = known_scope_of(optimizer, Scope.ELEMENT if shard is None else Scope.PARAMETER)
        if scope is Scope.REPLICA or (scope is Scope.PARAMETER and shard is None):
            needed = "all parameters of a replica" if scope is Scope.REPLICA else "whole parameters"
            raise ValueError(
                f"mesh: {type(optimizer).__name__} computes its update from {needed}, but each rank of a group has a "
                "part; choose an optimizer that updates each element by itself (SGD, AdamW), or "
                + ('shard="none"' if scope is Scope.REPLICA else 'shard="optimizer", which deals them whole')
            )


def check_follow_ups(compression: Compression, membership: Membership) -> None:
    """Refuse a compression whose messages are checked on the host if those of devices cannot pass through it."""
    on_device = any(kind != "cpu" and name != "gloo" for kind, name in membership.backends.items())
    if on_device and not membership.has_host_path:
        raise ValueError(
            f"compression {compression.describe()} checks every message on the host, but {membership.backend_name} "
            'keeps messages on the device; choose bf16 or fp16, or initialise with backend="cpu:gloo,cuda:nccl"'
        )


def check_positive(name: str, value: object, what: str) -> None:
    """Refuse anything that is not a positive number; ``what`` describes it for the error."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a {what}, got {value!r}")
    if not value > 0:
        raise ValueError(f"{name} must be a positive {what}, got {value}")
