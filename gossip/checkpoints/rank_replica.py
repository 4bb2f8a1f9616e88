"""The replica of one rank, or the shard of it that a rank of a group holds, in one process of a distributed run.

And the mean over its ranks, tensor by tensor and chunk by chunk, from whole ranks or shards.
"""

import functools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gossip.checkpoints.replicas import (
    Divisions,
    Replicas,
    compare,
    describe_model,
    describe_module,
    describe_optimizers,
    describe_part,
    exported_tensors,
    rng_states,
    run_on_all_ranks,
)
from gossip.checkpoints.resizing import reshard
from gossip.communication.world import World
from gossip.optimizers.schedule_free import check_evaluated
from gossip.parameters import digests
from gossip.parameters.buckets import is_mixable
from gossip.parameters.buffers import as_real, is_averaged, persistent_buffers
from gossip.parameters.digests import chunks_in_memory_order, digest_of, memory_order
from gossip.parameters.extra_state import extra_states
from gossip.parameters.global_average import shares
from gossip.parameters.names import named_buffers, named_parameters
from gossip.parameters.serializable_state import compact
from gossip.sharding.local_group import PartitionedGroup
from gossip.sharding.shard_mesh import Division
from gossip.step.collective_operations import settle
from gossip.step.engine import StepEngine
from gossip.step.state.replica_state import module_state, optimizer_state, restore_replica
from gossip.wrapper import GossipDataParallel


class Mean(NamedTuple):
    """The mean of one tensor over the ranks."""

    name: str
    tensor: torch.Tensor
    """This rank's, from which the mean has shape, dtype and the order of elements in memory."""
    chunks: Iterator[torch.Tensor]
    """The mean, of what is not averaged this rank's values: flat, in that order, up to 16 MiB each. Collective."""

    def assemble(self, *, is_kept: bool) -> torch.Tensor | None:
        """Return the whole mean, on the CPU, or None unless it ``is_kept`` on this rank. Collective."""
        result = torch.empty(self.tensor.numel() if is_kept else 0, dtype=self.tensor.dtype)
        place = 0
        for chunk in self.chunks:
            if is_kept:
                result[place : place + len(chunk)].copy_(chunk)
            place += len(chunk)
        if not is_kept:
            return None
        order = memory_order(self.tensor)
        inverse = sorted(range(self.tensor.dim()), key=order.__getitem__)
        return result.view([self.tensor.shape[dim] for dim in order]).permute(inverse)


def means_over_ranks(replicas: Replicas, engine: StepEngine, world: World, divisions: Divisions) -> Iterator[Mean]:
    """Return the mean of each exported tensor, to be taken in turn, every one completely. Collective.

    Raises ManifestError: the ranks' tensors differ in shape, dtype or strides.
    """
    module = engine.module
    engine.frozen.compare()
    equal = engine.frozen.names_of_equal()
    digests = run_on_all_ranks(replicas, "gossip.export", lambda: _digest(module, equal))
    tensors, averaged = dict(exported_tensors(module)), _averaged(module)
    uneven = {name: each for name, each in divisions.items() if not each.is_even}
    entries = {
        name: f"{describe_part(tensor, uneven.get(name))} strides {list(tensor.stride())}"
        for name, tensor in tensors.items()
    }
    compare(replicas, entries, "comparing what is exported")
    size = len(digests) // world.world_size  # how many ranks share a replica: theirs need not be equal to each other
    are_equal = all(digest == digests[number % size] for number, digest in enumerate(digests))
    weights = shares(engine.weights(), world)

    def chunks(name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        is_averaged, weight = not are_equal and name not in equal and name in averaged, weights.get(name, 1.0)
        for chunk in chunks_in_memory_order(tensor):
            if not is_averaged:
                yield chunk
                continue
            wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32), copy=True)
            if weight != 1.0:
                wide.mul_(weight)
            with engine.fatal():
                world.average_(as_real(wide), f"averaging {name!r}")
            yield wide.to(chunk.dtype)

    return (Mean(name, tensor, chunks(name, tensor)) for name, tensor in tensors.items())


def _digest(module: nn.Module, equal: Container[str]) -> str:
    """Return a hash of everything that is not known to be equal on all ranks."""
    averaged, exported = _averaged(module), exported_tensors(module)
    return digest_of(tensor for name, tensor in exported if name not in equal and name in averaged).hex()


def _averaged(module: nn.Module) -> set[str]:
    """Return the names of what has a mean."""
    names = {name for name, parameter in named_parameters(module) if is_mixable(parameter)}
    return names | {name for name, buffer in named_buffers(module) if is_averaged(buffer)}


def gather_shards(mean: Mean, division: Division, group: PartitionedGroup) -> torch.Tensor | None:
    """Return the shards as one, without what pads them, on the group's first rank. Collective over the group.

    Every rank has the ``mean`` of its own shard.
    """
    num_shards, is_first = group.num_shards, group.rank == 0
    shape, dtype, dimension = mean.tensor.shape, mean.tensor.dtype, division.dimension
    whole = torch.empty(division.whole_shape(shape) if is_first else [0], dtype=dtype)
    rows = whole.view(math.prod(shape[:dimension]), -1) if whole.numel() else whole
    inner = math.prod(shape[dimension + 1 :])
    chunk_numel = max(1, digests.CHUNK_BYTES // dtype.itemsize)
    piece_numel = max(1, chunk_numel // num_shards)  # all shards of a piece together are a chunk
    pieces = (piece for chunk in mean.chunks for piece in chunk.split(piece_numel) if len(piece))
    longest = max(division.lengths) * math.prod(shape[:dimension]) * inner
    chunks = (range(first, min(first + chunk_numel, longest)) for first in range(0, longest, chunk_numel))
    for start in (start for chunk in chunks for start in chunk[::piece_numel]):
        piece = next(pieces, torch.empty(0, dtype=dtype))
        payload = bytes(piece.cpu().contiguous().view(torch.uint8).numpy())
        payloads = group.world.gather_bytes(payload, f"gathering {mean.name!r}")
        if is_first:
            for place, each in enumerate(payloads):
                if each:
                    values = torch.frombuffer(bytearray(each), dtype=torch.uint8).view(dtype)
                    _place_(rows, values, start, division.starts[place] * inner, division.lengths[place] * inner)
    return whole if is_first else None


def _place_(rows: torch.Tensor, values: torch.Tensor, start: int, begin: int, width: int) -> None:
    """Write consecutive elements of a shard, from ``start`` on, where they belong in the whole tensor.

    Parameters
    ----------
    rows : Tensor, [num_rows, numel]
        The whole, flattened before and after the dimension along which it is divided, without room for padding.
    begin : int
        Where the part of the shard, which is flattened [num_rows, width], begins in each row.
    """
    stop = start + len(values)
    for row in range(start // width, -(-stop // width)):
        first, last = max(start, row * width), min(stop, (row + 1) * width)
        target = rows[row, begin + first - row * width : begin + last - row * width]
        target.copy_(values[first - start :][: len(target)])


class RankReplica(Replicas):
    """That of a model and its optimizers; with ``mesh=`` the ranks are all ranks of all groups, group by group."""

    def __init__(self, model: GossipDataParallel) -> None:
        self._model = model
        self.kept = model._kept
        self._engine = model._live()
        self._engine.check_alive()
        self._optimizers = self._engine.updater.optimizers
        self._world = world = model._world  # the ranks that take part: one that has just joined may not
        self.timeout = world.timeout
        self._group = group = self._engine.group
        self.num_shards, self.place, self.group_size = group.num_shards, group.place, group.size
        self.process = world.rank * group.size + group.rank
        self.ranks = range(self.process, self.process + 1)
        self.world_size = self.num_processes = world.world_size * group.size

    @functools.cached_property
    def step(self) -> int:
        """The number of steps made; with an asynchronous algorithm, that of the rank that has made the most."""
        if not self._model.algorithm.is_asynchronous:
            return self._model.step
        return max(map(int, self.gather(self._model.step, "comparing numbers of steps")))

    def gather(self, content: Any, what: str) -> list[Any]:
        with self._engine.fatal():
            everyone = self._world.gather_json(self._group.gather_json(content, what), what)
        return [each for of_group in everyone for each in of_group]

    def check_between_steps(self) -> None:
        self._engine.check_between_steps()

    def describe(self) -> dict[str, Any]:
        groups = [
            (type(optimizer).__name__, [group["params"] for group in optimizer.param_groups])
            for optimizer in self._optimizers
        ]
        engine = self._engine
        uneven = {name: each for name, each in self._divisions().items() if not each.is_even}
        shard = {"shard": describe_module(engine.module, uneven)} if self._group.is_shared else {}
        optimizers = describe_optimizers(groups, named_parameters(engine.module))
        return describe_model(self._model, optimizers, engine.buckets, engine.unfrozen, uneven) | shard

    @functools.cached_property
    def _optimizer_states(self) -> list[dict[str, Any]]:
        named = list(named_parameters(self._engine.module))
        return [optimizer_state(optimizer, named) for optimizer in self._optimizers]

    def check_savable(self) -> None:
        _ = self._optimizer_states
        extra_states(self._model.module)

    def settle(self) -> None:
        self._engine.frozen.compare()
        settle(self._engine, self._world)
        with self._engine.fatal():
            self._engine.exchanges.arrive()  # copying it, which may fail, is no exchange

    def states(self) -> Iterator[dict[str, Any]]:
        scaler = self._engine.updater.scaler
        yield {
            **module_state(self._engine),
            "optimizers": self._optimizer_states,
            "scaler": None if scaler is None else scaler.scaler.state_dict(),
            "engine": self._engine.state_dict(),
            "rng": rng_states(),
            "unreduced": {name: compact(gradient, name) for name, gradient in self._group.unreduced().items()},
        }

    def _divisions(self) -> Mapping[str, Division]:
        return self._group.divisions if self.num_shards > 1 else {}

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in named_parameters(self._engine.module)}
        of_optimizers = [
            [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in self._optimizers
        ]
        shapes = {name: parameter.shape for name, parameter in named_parameters(self._model.module)}
        return reshard(states, shapes, self._divisions(), of_optimizers, self.place)

    def unfreeze(self, names: Sequence[str]) -> None:
        self._engine.unfreeze(names)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        (state,) = states
        left_out = restore_replica(self._engine, self._optimizers, state)
        self._group.restore_unreduced(state.get("unreduced", {}))
        self._group.changed()
        return left_out

    def exported(self) -> dict[str, torch.Tensor]:
        divisions = self._divisions()
        tensors = {name: tensor.to("meta") for name, tensor in exported_tensors(self._engine.module)}
        return {
            name: tensor.new_empty(divisions[name].whole_shape(tensor.shape)) if name in divisions else tensor
            for name, tensor in tensors.items()
        }

    def averages(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Rank 0 holds the result; the others a chunk of their shard, and of all shards a chunk altogether."""
        check_evaluated(self._optimizers, "export()")
        settle(self._engine, self._world)
        divisions = self._divisions()
        means = means_over_ranks(self, self._engine, self._world, divisions)
        return ((mean.name, self._whole(mean, divisions.get(mean.name))) for mean in means)

    def _whole(self, mean: Mean, division: Division | None) -> torch.Tensor | None:
        """Return the mean of a tensor, whole, on rank 0.

        The ranks of the first group have the means of all shards together, and buffers of their own.
        """
        is_first, is_buffer = self.process == 0, mean.name in dict(persistent_buffers(self._engine.module))
        if self._world.rank or not (self._group.is_shared and (division or is_buffer)):
            return mean.assemble(is_kept=is_first)
        with self._engine.fatal():
            if division is not None:
                assert isinstance(self._group, PartitionedGroup)
                return gather_shards(mean, division, self._group)
            tensor = mean.assemble(is_kept=True)
            assert tensor is not None
            self._group.average_(mean.name, tensor)
        return tensor if is_first else None
