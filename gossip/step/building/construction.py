"""Construction of a model's parts from the wrapper's arguments, the same on every rank."""

from __future__ import annotations

import contextlib
import functools
import os
import types
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from gossip import private_torch
from gossip.algorithms import Algorithm, resolve_algorithm
from gossip.communication import training_store
from gossip.communication.authenticated_store import VARIABLE
from gossip.communication.flags import AgreedFlag, Flag
from gossip.communication.host import forks
from gossip.communication.host.open_files import limit_named
from gossip.communication.world import World
from gossip.compression.codec import Compression
from gossip.compression.compression_names import resolve_compression
from gossip.errors import GossipError, warn_user
from gossip.exchange.clipping import clips_above
from gossip.exchange.distributed_transport import DistributedTransport
from gossip.exchange.rank_exchanges import AnyBucket, RankExchanges
from gossip.exchange.transport import TransportFactory, make_transport
from gossip.exchange.transport_names import resolve_transport
from gossip.optimizers.bucket_optimizer import (
    OptimizerWatch,
    build_optimizers,
    describe_optimizers,
    replace_step,
    restore_step,
)
from gossip.optimizers.loss_scale import SharedScaler
from gossip.optimizers.scopes import names_needed_whole
from gossip.parameters.buckets import Bucket, check_dense, check_parameters, make_buckets
from gossip.parameters.buffers import make_buffer_buckets
from gossip.parameters.frozen_parameters import FrozenParameters
from gossip.parameters.manifest import CONSTRUCTION, Manifest, build_manifest, compare_manifests
from gossip.parameters.module_proxy import Outermost
from gossip.parameters.names import named_parameters
from gossip.parameters.parameter_slots import check_not_wrapped
from gossip.private_torch import fsdp_modules
from gossip.sharding.fsdp_group import FSDPGroup
from gossip.sharding.local_group import LocalGroup, ReplicaGroup, check_mesh, check_mesh_of_all
from gossip.sharding.zero_group import ZeroGroup
from gossip.step.building.wrapper_arguments import (
    Arguments,
    check_arguments,
    check_combination,
    check_follow_ups,
    check_mesh_arguments,
    prepare_algorithm,
    resolve_topology,
)
from gossip.step.engine import StepEngine
from gossip.step.forward_waits import AwaitHook, ForwardWaits
from gossip.step.local_update import Updater
from gossip.step.step_kinds import BackwardSteps, BucketwiseSteps, GatheredSteps, OptimizerSteps
from topologies import Topology

if TYPE_CHECKING:
    from gossip.elastic.shard_group_world import ShardGroupWorld

_MAX_BUCKETS_LISTED = 8


@dataclass(frozen=True)
class Parts:
    """The parts of a wrapped model."""

    topology: Topology
    algorithm: Algorithm
    compression: Compression
    optimizers: tuple[Optimizer, ...]
    engine: StepEngine
    manifest: Manifest


@limit_named()
def construct(module: nn.Module, arguments: Arguments, world: World, local: World | None) -> Parts:
    """Check the arguments, compare them between ranks, build the parts, and start all ranks from rank 0. Collective.

    ``local`` are the ranks that hold a replica together, if there is a mesh; errors close it.
    """
    has_compared = False
    try:
        check_mesh_arguments(arguments)
        check_not_wrapped(module, may_be_sharded=local is not None)
        group = LocalGroup(module, module) if local is None else _make_local_group(module, arguments, local)
        module = group.replica
        topology, algorithm, compression, optimizers, manifest = _check(group, arguments, world)
        if local is not None:
            has_compared = True
            compare_manifests(local, manifest)
    except Exception as error:
        # The other ranks are about to compare manifests: tell them, so that they do not wait.
        refusal = {CONSTRUCTION: f"refused ({error})"}
        for ranks in (None if has_compared else local, world):
            with contextlib.suppress(GossipError):
                if ranks is not None:
                    compare_manifests(ranks, refusal)
        if local is not None:
            local.close()
        raise
    compare_manifests(world, manifest)

    trained = [(name, parameter) for name, parameter in named_parameters(module) if parameter.requires_grad]
    frozen = [(name, parameter) for name, parameter in named_parameters(module) if not parameter.requires_grad]
    bucket_cap_bytes = int(arguments.bucket_cap_mb * 2**20) // group.num_shards
    buckets = make_buckets(trained, bucket_cap_bytes, numels=group.numels_of_uneven())
    values = [*(bucket.block for bucket in buckets), *(parameter for _, parameter in frozen), *module.buffers()]
    group.start_equal_()
    world.broadcast_(values, "broadcasting parameters and buffers from rank 0")
    schedule = algorithm.schedule(topology)
    everything: tuple[AnyBucket, ...] = buckets
    if arguments.buffers == "average":
        everything += make_buffer_buckets(module, len(buckets))

    transport = None
    if schedule.world_size > 1 and not world.is_alone:
        transport = make_transport(_transport_factory(arguments, algorithm, compression), world, schedule)
    scaler = None
    if arguments.open_scaler is not None:
        flag = make_flag(world, "agreeing on the loss scale")
        scaler = SharedScaler(arguments.open_scaler, flag, steps_in_backward=arguments.step_in_backward)
    updater = Updater(
        optimizers,
        everything,
        list(module.parameters()),
        clip_grad_norm=arguments.clip_grad_norm,
        clip=arguments.clip,
        scaler=scaler,
        rank=world.member,
        group=group,
    )
    # The position among the ranks at the beginning, even if some have been lost since.
    place = world.rank if world.is_alone else world.worker
    exchanges = RankExchanges(
        everything,
        optimizers,
        schedule,
        transport,
        algorithm,
        group.divided(compression),
        place,
        arguments.max_difference,
    )
    keep_out_of_graphs()
    if not arguments.step_in_backward:
        make_engine: type[StepEngine] = OptimizerSteps
    else:
        make_engine = BucketwiseSteps if arguments.updates_by_bucket else GatheredSteps
    engine = make_engine(
        module,
        everything,
        FrozenParameters(frozen, world),
        exchanges,
        updater,
        bucket_cap_bytes=bucket_cap_bytes,
        watch=OptimizerWatch(named_parameters(module), optimizers),
    )
    group.hears_late = arguments.soft_deadline is not None
    group.attach(buckets, engine)
    if not world.is_alone or world.changes:  # one that joins will not be alone
        forks.watch(engine)
    for optimizer in optimizers:
        replace_step(optimizer, engine.step_optimizer, by_bucket=arguments.updates_by_bucket)
    parts = Parts(topology, algorithm, compression, optimizers, engine, manifest)
    if world.rank == group.rank == 0:
        _announce(parts, arguments)
    return parts


@limit_named()
def make_worlds(
    arguments: Arguments, timeout: timedelta, process_group: dist.ProcessGroup | None
) -> tuple[World, World | None]:
    """Return the ranks that gossip with each other, and with a mesh those that hold a replica together. Collective."""
    mesh, continues = arguments.mesh, arguments.continues
    if mesh is None:
        return _make_world(arguments, timeout, process_group), None
    if process_group is not None:
        raise ValueError(
            "process_group cannot be combined with mesh, whose gossip dimension is that group; leave it out"
        )
    check_mesh(mesh)
    if not continues:
        world = _make_world(arguments, timeout, mesh.get_group("gossip"))
        return world, World(timeout, mesh.get_group("shard"))
    from gossip.elastic.shard_group_world import ShardGroupWorld

    check_mesh_of_all(mesh)
    local = ShardGroupWorld(timeout, mesh.get_group("shard"))
    try:
        return _make_world(arguments, timeout, None, local), local
    except BaseException:
        local.close()
        raise


def _make_world(
    arguments: Arguments,
    timeout: timedelta,
    process_group: dist.ProcessGroup | None,
    shard_group: ShardGroupWorld | None = None,
) -> World:
    meets = training_store.joined() is not None or training_store.is_founder()
    if training_store.STORE in os.environ and not meets:
        raise ValueError(
            f"{training_store.STORE} is set, but this process has not met the others, and would train without them; "
            "call gossip.join_training() in place of init_process_group, use gossip.launch, or unset the variable"
        )
    if arguments.continues:
        from gossip.elastic.elastic_world import ElasticWorld

        return ElasticWorld(
            timeout,
            process_group,
            min_ranks=arguments.min_ranks,
            is_in_step=not arguments.is_asynchronous,
            authenticate=arguments.authenticate,
            ends_if_preempted=arguments.on_preemption is not None,
            shard_group=shard_group,
        )
    if meets:
        raise ValueError(
            'this process joins a training; pass on_peer_loss="continue", as on the ranks that train, got "raise"'
        )
    world = World(timeout, process_group)
    if world.rank == 0 and VARIABLE in os.environ:
        warn_user(
            f'{VARIABLE} has no effect with on_peer_loss="raise": messages go through torch.distributed, which '
            'authenticates none; pass on_peer_loss="continue"'
        )
    return world


def _make_local_group(module: nn.Module, arguments: Arguments, world: World) -> LocalGroup:
    """Return the group of the ranks ``world``, with which this one trains a replica. Local."""
    assert arguments.mesh is not None
    check_dense(module, "but sparse gradients cannot be averaged over the ranks of a group")
    if arguments.shard is None:
        return FSDPGroup(module, arguments.mesh, world)
    if fsdp_modules(module):
        raise ValueError(
            f'shard="{arguments.shard}" is for a module that is not sharded, but fully_shard was applied to it; leave '
            "out one of them"
        )
    if arguments.shard == "none":
        return ReplicaGroup(module, world)
    return ZeroGroup(module, world, names_needed_whole(arguments.optimizer, module))


def make_flag(world: World, what: str) -> Flag:
    """Return a flag on which the ranks of a world agree while they train, even if some are lost. Collective."""
    if not world.changes:
        return AgreedFlag(world, what)
    from gossip.elastic.elastic_flag import ElasticFlag
    from gossip.elastic.elastic_world import ElasticWorld

    assert isinstance(world, ElasticWorld)
    return ElasticFlag(world, what)


def give_back(engine: StepEngine, world: World, optimizers: tuple[Optimizer, ...]) -> None:
    """Undo what :func:`construct` set up: hooks, threads, communicators, and the optimizers' own ``step()``."""
    engine.close()
    engine.group.close()
    if engine.updater.scaler is not None:
        engine.updater.scaler.close()
    world.close()
    for optimizer in optimizers:
        restore_step(optimizer)


def _check(
    group: LocalGroup, arguments: Arguments, world: World
) -> tuple[Topology, Algorithm, Compression, tuple[Optimizer, ...], Manifest]:
    module = group.replica
    topology = resolve_topology(arguments.topology, world.world_size)
    algorithm = resolve_algorithm(arguments.algorithm)
    compression = resolve_compression(arguments.compression)
    if compression.follows_up and world.membership is not None:
        check_follow_ups(compression, world.membership)
        if world.device_paths is not None:
            world.device_paths.go_through_host()
    check_arguments(arguments, module)
    check_parameters(module)
    in_backward, by_bucket = arguments.step_in_backward, arguments.updates_by_bucket
    optimizers = build_optimizers(arguments.optimizer, module, in_backward=in_backward, by_bucket=by_bucket)
    averages_buffers = arguments.buffers == "average"
    algorithm = prepare_algorithm(algorithm, topology, compression, optimizers, averages_buffers=averages_buffers)
    check_combination(arguments, algorithm, compression, optimizers)
    settings = {
        "algorithm": algorithm.describe(),
        "compression": compression.describe(),
        **arguments.describe(),
        **describe_optimizers(optimizers),
    }
    manifest = build_manifest(group.described, topology, settings, arguments.replica)
    return topology, algorithm, compression, optimizers, manifest


def _transport_factory(arguments: Arguments, algorithm: Algorithm, compression: Compression) -> TransportFactory:
    if arguments.continues:
        from gossip.exchange.edge_transport import make_generation_transport

        return functools.partial(
            make_generation_transport,
            algorithm=algorithm,
            compression=compression,
            soft_deadline_s=arguments.soft_deadline_s,
        )
    factory = resolve_transport(arguments.transport)
    if factory is DistributedTransport:
        adds_on_wire = (algorithm.compression or compression).adds_on_wire
        clips = clips_above(arguments.max_difference) is not None
        return functools.partial(DistributedTransport, sums_on_wire=adds_on_wire and not clips)
    return factory


def _announce(parts: Parts, arguments: Arguments) -> None:
    """Log ranks, schedule, algorithm and compression in one line; at level TRACE also buckets and transport."""
    topology, engine = parts.topology, parts.engine
    size, shards = topology.world_size, arguments.mesh
    ranks = f"{size} rank{'s' * (size != 1)}"
    if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:
        ranks = "1 rank that trains alone (gossip.launch, or torchrun and init_process_group, start several)"
    if shards is not None:
        ranks = f"{size} group{'s' * (size != 1)} of {shards.size(1)} ranks"
    period = "no period" if topology.period is None else f"period {topology.period}"
    when = "bucket by bucket in backward" if arguments.updates_by_bucket else "at the end of backward"
    logger.info(
        f"{ranks}, topology {topology.name} ({period}), {parts.algorithm.describe()}, compression "
        f"{parts.compression.describe()}, steps {when if arguments.step_in_backward else 'in optimizer.step()'}"
    )
    listed = [_describe_bucket(bucket) for bucket in engine.buckets]
    hidden = len(listed) - _MAX_BUCKETS_LISTED
    text = ", ".join(listed[:_MAX_BUCKETS_LISTED]) + (f", {hidden} more" if hidden > 0 else "")
    silent = f"; {_size(engine.frozen.num_bytes)} of frozen parameters are not sent" if engine.frozen else ""
    logger.trace("{} bucket{}: {}{}", len(listed), "s" * (len(listed) != 1), text or "nothing to train", silent)
    if engine.exchanges.transport is not None:
        logger.trace("{}", engine.exchanges.transport.describe())


def _describe_bucket(bucket: AnyBucket) -> str:
    kind = "" if isinstance(bucket, Bucket) else "buffers "
    dtype = str(bucket.block.dtype).removeprefix("torch.")
    return f"{kind}{_size(bucket.block.nbytes)} {dtype} on {bucket.block.device}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.3g} KiB"


_OURS: dict[type, tuple[str, ...]] = {
    StepEngine: ("begin_forward", "end_forward", "_on_backward", "_on_backward_ended"),
    BackwardSteps: ("begin_forward", "_on_first_gradient", "step_optimizer"),
    BucketwiseSteps: ("_launch_ready",),
    OptimizerSteps: ("step_optimizer",),
    Outermost: ("check_outermost",),
    ForwardWaits: ("watched", "call_watched"),
    AwaitHook: ("__call__",),
}


@functools.cache
def keep_out_of_graphs() -> None:
    """Keep the compiler out of this package's functions, which it would trace with graph breaks and warnings.

    Called with the first model, because it imports the compiler: decorators would make importing gossip take a second
    longer in every program.
    """
    for owner, names in _OURS.items():
        for name in names:
            setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
    # These are called once per parameter: torch.compiler.disable would make them ten times slower.
    for constant in BackwardSteps._make_hook.__code__.co_consts:
        if isinstance(constant, types.CodeType):
            private_torch.keep_out_of_graphs(constant)
