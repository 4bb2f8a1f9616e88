"""The global average of the replicas, and their distance from it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gossip.communication.staged_collectives import StagedCollectives
from gossip.communication.world import World
from gossip.errors import ExchangeError, GossipError
from gossip.parameters.buckets import Bucket, is_mixable
from gossip.parameters.buffers import as_real, is_averaged
from gossip.parameters.extra_state import broadcast_extra_states, describe_extra_states, snapshot_extra_states
from gossip.parameters.frozen_parameters import FrozenParameters
from gossip.parameters.manifest import compare_manifests
from gossip.parameters.names import named_buffers
from gossip.private_torch import own_buffers


def average_module_(
    module: nn.Module,
    buckets: Sequence[Bucket],
    frozen: FrozenParameters,
    world: World,
    weights: Mapping[str, float],
    *,
    is_put_back: bool = False,
) -> None:
    """Set parameters and float buffers to their mean over ranks, all else to rank 0's values. In place, collective.

    All else are the other buffers, and the extra states of modules.

    ``weights`` is how much this rank's values of each parameter count, the same for all in a bucket; equally if not
    named.

    Raises ExchangeError: every single value is either the mean (or rank 0's), or still this rank's own; the text says
    which, unless the caller restores all values. Values that fit into 64 MiB are never mixed: they are all this rank's
    own, or, if the error occurred when another rank was about to assign them, all the mean.
    """
    scratch = StagedCollectives(world)
    with torch.no_grad():
        try:
            weights = shares(weights, world)
            _compare_buffers(module, world)
            for bucket in buckets:
                scratch.average(bucket.block, f"averaging bucket {bucket.index}", weights.get(bucket.names[0], 1.0))
            differing = [
                (f"frozen parameter {name!r}", each, is_mixable(each)) for name, each in frozen.differing_values()
            ]
            buffers = [(f"buffer {name!r}", each, is_averaged(each)) for name, each in named_buffers(module)]
            for what, values, has_mean in differing + buffers:
                if has_mean:
                    scratch.average(as_real(values), f"averaging {what}")
                else:
                    scratch.broadcast(values, f"broadcasting {what} from rank 0")
            scratch.assign()
            broadcast_extra_states(module, world)
        except ExchangeError as error:
            state = "parameters and buffers are as they were before"
            if scratch.num_assigned and not is_put_back:
                state = f"{scratch.num_assigned} values of parameters and buffers are the mean, all others its own"
            raise ExchangeError(f"{error}; on this rank {state}", failed_ranks=error.failed_ranks) from error
        finally:
            for bucket in buckets:
                bucket.written()
            frozen.note_differing()


def shares(weights: Mapping[str, float], world: World) -> dict[str, float]:
    """Return the weights such that over ranks each sums to the number of ranks. Collective if there are any."""
    total = torch.tensor(list(weights.values()), dtype=torch.float64)
    world.sum_(total, "adding up how much the ranks count")
    return {
        name: weight * world.world_size / sum_
        for (name, weight), sum_ in zip(weights.items(), total.tolist(), strict=True)
    }


def _compare_buffers(module: nn.Module, world: World) -> None:
    """Compare buffers, which may have changed since construction: gloo aborts the process if shapes differ."""
    described = {name: f"{buffer.dtype} {list(buffer.shape)}" for name, buffer in named_buffers(module)}
    manifest = {f"buffer {name!r}": text for name, text in described.items()} | describe_extra_states(module)
    compare_manifests(
        world,
        manifest,
        "comparing buffers before averaging",
        advice="a buffer that grows with the data cannot be averaged: keep it out of register_buffer",
    )


def snapshot(
    module: nn.Module, buckets: Sequence[Bucket], copy_of: Callable[[int], torch.Tensor | None]
) -> Callable[[], None]:
    """Copy parameters, buffers and extra states, and return a function that restores them exactly. Local.

    ``copy_of`` returns memory that may already hold a bucket's values and is not written before they are restored.
    """
    put_back_extra_states = snapshot_extra_states(module)
    with torch.no_grad():
        blocks = [_kept(bucket.block, copy_of(bucket.index)) for bucket in buckets]
        buffers = [
            (own_buffers(owner), key, buffer, buffer.clone())
            for owner in module.modules()
            for key, buffer in own_buffers(owner).items()
            if buffer is not None
        ]

    @torch.no_grad()
    def put_back() -> None:
        for bucket, block in zip(buckets, blocks, strict=True):
            bucket.reclaim()
            bucket.block.copy_(block)
            bucket.written()
        for owned, key, buffer, values in buffers:
            buffer.copy_(values)
            owned[key] = buffer  # a forward pass may have replaced the buffer
        put_back_extra_states()

    return put_back


def _kept(values: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
    is_like = copy is not None and (copy.shape, copy.dtype, copy.device) == (values.shape, values.dtype, values.device)
    return copy if copy is not None and is_like and bool(_bits(copy).equal(_bits(values))) else values.clone()


def _bits(values: torch.Tensor) -> torch.Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(values.element_size(), torch.uint8)
    return values.detach().view(integers)  # -0.0 is equal to 0.0


def consensus_distance(
    buckets: Sequence[Bucket], frozen: FrozenParameters, world: World, weights: Mapping[str, float]
) -> tuple[float, float]:
    """Return the root mean square distance of the replicas from their mean, and the norm of the mean. Collective."""
    squares, weights = torch.zeros(2, dtype=torch.float64), shares(weights, world)
    mean_norm = math.hypot(*map(_norm, frozen.equal_values()))
    exchanged = [(f"bucket {bucket.index}", bucket.block, weights.get(bucket.names[0], 1.0)) for bucket in buckets]
    exchanged += [(name, values, 1.0) for name, values in frozen.differing_values() if is_mixable(values)]
    for name, values, weight in exchanged:
        mean = values.clone() if weight == 1.0 else values * weight
        world.average_(mean, f"consensus distance of {name}")
        squares[0] += _norm(values - mean) ** 2
        mean_norm = math.hypot(mean_norm, _norm(mean))
    world.sum_(squares, "consensus distance")
    distance = math.sqrt(float(squares[0]) / world.world_size)
    return distance, mean_norm


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


@torch.no_grad()
def recalibrate_(module: nn.Module, batches: Iterable[Any], world: World) -> None:
    """Estimate batch norm's running statistics anew, from the batches of all ranks. In place, collective.

    Each rank's statistics are plain means over its batches; ranks are weighted by their numbers of batches.

    Raises ValueError: no rank has a batch.
    """
    norms = {name: part for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)}
    num_batches, failure = 0, None
    modes = {part: part.training for part in module.modules()}
    module.eval()  # dropout stays off, as in the evaluation
    momenta = {norm: norm.momentum for norm in norms.values()}
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean
        norm.train()
    try:
        for batch in batches:
            num_batches += 1
            if isinstance(batch, Mapping):
                module(**batch)
            else:
                module(batch[0] if isinstance(batch, list | tuple) else batch)
    except Exception as error:
        failure = error
    finally:
        for part, mode in modes.items():
            part.training = mode
        for norm, momentum in momenta.items():
            norm.momentum = momentum
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    failures = world.gather_bytes(text.encode(), "recalibrating: comparing what went wrong")
    for rank, found in enumerate(failures):
        if found:
            raise GossipError(
                f"recalibrate failed on rank {rank}: {found.decode()}; its batches must be inputs, tuples that begin "
                "with the inputs, or mappings of the module's arguments"
            ) from failure
    total = torch.tensor([float(num_batches)], dtype=torch.float64)
    world.sum_(total, "counting batches for recalibration")
    if not total.item():
        raise ValueError("recalibrate has no batch on any rank; pass a loader with at least one, fresh each time")
    for name, norm in norms.items():
        for statistic in (norm.running_mean, norm.running_var):
            if statistic is not None:
                statistic.mul_(num_batches * world.world_size / total.item())
                world.average_(statistic, f"recalibrating {name!r}")
