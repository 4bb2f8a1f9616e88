"""The ranks that train one replica together, on a node: one gossip worker."""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from gossip.communication.row_collectives import RowCollectives
from gossip.communication.world import World
from gossip.compression.codec import BucketShape, Codec, Compression
from gossip.compression.conversation import Arrival, Turns, accumulation_dtype
from gossip.parameters.buckets import Bucket
from gossip.parameters.buffers import as_real, is_averaged
from gossip.parameters.extra_state import broadcast_extra_states
from gossip.parameters.names import named_buffers, named_parameters
from gossip.sharding.shard_mesh import DIMENSIONS, Division, chunk_length
from topologies import Round, Topology

Gather = Callable[[torch.Tensor, str], Callable[[], None]]


class Steps(Protocol):
    """What a group needs of the engine that makes the steps."""

    def combine_if_due(self) -> None:
        """Combine what must be combined before values are read."""

    def on_shared_gradient(self) -> bool:
        """React to a gradient that becomes the replica's later, averaged; return whether its pass makes a step."""

    def refuse_late_gradient(self, index: int, name: str) -> NoReturn:
        """Raise because a parameter has got a gradient when its bucket had been handled."""


class LocalGroup:
    """The group of this rank, and the ``replica``: what this rank trains and exchanges of the wrapped ``module``.

    The methods here are those of a rank that trains its replica alone.
    """

    rank, size = 0, 1
    """The place of this rank among those that train the replica, and how many they are."""
    num_shards, place = 1, 0
    """Into how many shards the replica is divided, and which of them this rank holds."""
    is_shared: ClassVar[bool] = False
    """Whether there is a mesh that says which ranks train the replica, if only one."""
    is_sharded_inside: ClassVar[bool] = False
    """Whether ``fully_shard`` has divided the module."""
    averages_gradients: ClassVar[bool] = False
    """Whether :meth:`reduce_` has anything to do."""
    divisions: Mapping[str, Division] = MappingProxyType({})
    """By name how the parameters that are divided are."""
    hears_late = False
    """Whether its ranks may combine messages between steps, each of them others."""

    def __init__(self, module: nn.Module, replica: nn.Module) -> None:
        self.module, self.replica = module, replica
        self.described = replica
        """What must be alike on all ranks of all groups."""

    # ------------------------------------------------------------------ construction

    def start_equal_(self) -> None:
        """Copy what every rank has whole from the group's first rank to the others. Collective over the group."""

    def attach(self, buckets: Iterable[Bucket], steps: Steps) -> None:
        """Begin to train ``buckets``, in launch order, by these ``steps``. Collective over the group."""

    def divided(self, compression: Compression) -> Compression:
        """Return how a rank of this group encodes a bucket of the replica. Local."""
        return compression

    # ------------------------------------------------------------------ steps

    def take_edits(self) -> None:
        """Take over what was written to the module since the last step. Local."""

    def before_forward(self, step: int) -> None:
        """Prepare the module for a forward pass before this step. Local."""

    def complete_gradients(self, step: int, *, is_idle: bool = False) -> None:
        """Give the replica the gradients of a backward pass that has ended. Collective over the group.

        ``is_idle``: this rank has made none for the step.
        """

    def drop_gradients(self) -> bool:
        """Drop the gradients that a backward pass that an exception ended has left to be averaged. Local.

        Returns whether that was possible: some may already have been averaged with those of the other ranks.
        """
        return True

    def updated(self, index: int) -> None:
        """React to the update of a bucket in this step. Collective over the group."""

    def finish_step(self) -> None:
        """Wait until the module has the values of this step. Collective over the group."""

    def changed(self) -> None:
        """React to values that were replaced outside a step. Collective over the group.

        Within a collective operation of all groups, some ranks of a group may make an attempt that others do not: they
        react after it, in :meth:`complete_changes`.
        """

    def complete_changes(self) -> None:
        """React to what was replaced within a collective operation. Collective over the group."""

    def reduce_(self, parameters: Iterable[nn.Parameter], step: int, index: int) -> None:
        """Replace a bucket's gradients by their means over the group, unless something else does. Collective over it.

        The parameters are the same on all its ranks; those without a gradient on some ranks count as zero there, and
        those without one on all ranks stay without.
        """

    def norm(self, norm: torch.Tensor, order: float = 2.0) -> torch.Tensor:
        """Return the norm of the whole replica's gradients from that of this rank's. Collective over the group."""
        del order
        return norm

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on any rank of the group. Collective over the group."""
        return flag

    # ------------------------------------------------------------------ between steps

    def unreduced(self) -> dict[str, torch.Tensor]:
        """Return by name the gradients of whole parameters that were accumulated and not averaged yet. Local."""
        return {}

    def restore_unreduced(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Continue with what :meth:`unreduced` returned. Local."""

    def sums(self, values: Iterable[float], what: str) -> list[float]:
        """Return the sums of what shards contribute. Collective over the group."""
        del what
        return list(values)

    def numels_of_uneven(self) -> Mapping[str, int]:
        """Return, of what is not divided evenly, how many elements each rank would have if it were. Local."""
        wholes = dict(named_parameters(self.module))
        uneven = (name for name, division in self.divisions.items() if not division.is_even)
        return {name: chunk_length(wholes[name].numel(), self.num_shards) for name in uneven}

    def gather_json(self, content: Any, what: str) -> list[Any]:
        """Return the plain data of each rank of the group. Collective over the group."""
        del what
        return [content]

    def average_(self, name: str, buffer: torch.Tensor) -> None:
        """Replace a buffer by its mean over the group, or its first rank's values. Collective over the group."""

    def average_buffers_(self) -> None:
        """Do so for all buffers; extra states become the first rank's. Collective over the group."""

    def close(self) -> None:
        """End communication within the group. Local."""


class SharedGroup(LocalGroup):
    """A group of the ranks of a mesh, each with the whole replica and, in the end, equal gradients."""

    is_shared = True
    rows: RowCollectives
    """Gathers and sums rows of the ranks, from :meth:`start_equal_` on."""

    def __init__(self, module: nn.Module, replica: nn.Module, world: World) -> None:
        super().__init__(module, replica)
        self.world = world
        self.rank, self.size = world.rank, world.world_size

    def start_equal_(self) -> None:
        shares_memory = all(parameter.is_cpu for parameter in self.module.parameters())
        self.rows = RowCollectives(self.world, shares_memory=shares_memory)
        whole = [] if self.is_sharded_inside else [parameter.data for parameter in self.module.parameters()]
        self.world.broadcast_([*whole, *self.module.buffers()], "broadcasting parameters and buffers within the group")

    def gather_json(self, content: Any, what: str) -> list[Any]:
        return self.world.gather_json(content, what)

    def average_(self, name: str, buffer: torch.Tensor) -> None:
        if is_averaged(buffer):
            self.world.average_(as_real(buffer), f"averaging buffer {name!r} over the shard group")
        else:
            self.world.broadcast_([buffer], f"broadcasting buffer {name!r} within the shard group")

    def average_buffers_(self) -> None:
        for name, buffer in named_buffers(self.module):
            self.average_(name, buffer)
        broadcast_extra_states(self.module, self.world)

    def close(self) -> None:
        self.world.close()


class PartitionedGroup(SharedGroup):
    """A group whose ranks each train and exchange a shard, the ``replica``, with its gradients and optimizer state."""

    def __init__(self, module: nn.Module, replica: nn.Module, world: World) -> None:
        super().__init__(module, replica, world)
        self.num_shards, self.place = self.size, self.rank
        self._handles: list[RemovableHandle] = []

    def attach(self, buckets: Iterable[Bucket], steps: Steps) -> None:
        del buckets
        self._handles.append(self.module.register_state_dict_pre_hook(lambda *_: steps.combine_if_due()))

    def norm(self, norm: torch.Tensor, order: float = 2.0) -> torch.Tensor:
        if not order > 0:
            raise ValueError(
                f"norm_type must be a positive number or inf with mesh, got {order}: the norm is that of what the "
                "ranks of a group have together"
            )
        if self.world.is_alone:
            return norm
        if order == math.inf:
            norms = self.world.gather_json(float(norm), "the norm of all gradients")
            return torch.tensor(norms, dtype=torch.float64).max().to(norm)
        power = norm.to(torch.float64) ** order
        self.world.sum_(power, "the norm of all gradients", holds_host=power.is_cpu)
        return (power ** (1.0 / order)).to(norm.dtype)

    def any(self, flag: bool) -> bool:
        if self.world.is_alone:
            return flag
        count = torch.tensor(float(flag))
        self.world.sum_(count, "agreeing within the shard group")
        return bool(count)

    def sums(self, values: Iterable[float], what: str) -> list[float]:
        summed = torch.tensor(list(values), dtype=torch.float64)
        self.world.sum_(summed, what)
        return summed.tolist()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        super().close()


def check_mesh_of_all(mesh: DeviceMesh) -> None:
    """Refuse, by ValueError, a mesh of other ranks than all, or in another order."""
    num_groups, size = mesh.shape
    if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise ValueError(
            f'on_peer_loss="continue": mesh must be of all {dist.get_world_size()} ranks in their order, got '
            f"{num_groups} groups of {size}: {mesh.mesh.tolist()}; make it by gossip.make_shard_mesh(local_size)"
        )


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuse, by TypeError or ValueError, anything that is not a mesh of the two dimensions."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}")
    if mesh.mesh_dim_names != DIMENSIONS:
        raise ValueError(
            f"mesh must have the dimensions {DIMENSIONS}, got {mesh.mesh_dim_names}; make it by "
            "gossip.make_shard_mesh(local_size)"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh: this rank is not among its ranks, {mesh.mesh.tolist()}; wrap the module only on these, or make a "
            "mesh of all ranks"
        )


class ReplicaGroup(SharedGroup):
    """A group whose ranks hold equal replicas and make equal updates, each from the group's mean gradient.

    Each rank sends its part of a bucket, and gets the whole difference.
    """

    averages_gradients = True

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__(module, module, world)

    def divided(self, compression: Compression) -> Compression:
        if self.world.is_alone:
            return compression
        return PartitionedCompression(compression, self.world.rank, self.world.world_size, self.rows.begin_gather)

    @torch.no_grad()
    def reduce_(self, parameters: Iterable[nn.Parameter], step: int, index: int) -> None:
        parameters = list(parameters)
        if self.world.is_alone or not parameters:
            return
        dtype = max((accumulation_dtype(each.dtype) for each in parameters), key=lambda each: each.itemsize)
        num_values = sum(parameter.numel() for parameter in parameters)
        flat = torch.zeros(num_values + len(parameters), dtype=dtype, device=parameters[0].device)
        *means, counts = flat.split([*[parameter.numel() for parameter in parameters], len(parameters)])
        has_all = True
        for number, parameter in enumerate(parameters):
            if parameter.grad is None:
                has_all = False
            else:
                means[number].view(parameter.shape).copy_(parameter.grad)
                counts[number] = 1.0
        what = f"step {step}, bucket {index}: averaging gradients over the ranks of the group"
        self.world.sum_(flat, what, holds_host=flat.is_cpu)
        flat[:num_values].div_(self.world.world_size)
        is_found = [True] * len(parameters) if has_all else (counts > 0).tolist()
        for parameter, mean, found in zip(parameters, means, is_found, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view(parameter.shape))
            elif found:
                parameter.grad = torch.empty_like(parameter).copy_(mean.view(parameter.shape))


class PartitionedCompression(Compression):
    """Encodes one of several equal parts of each bucket, as another compression does; the last may be shorter.

    ``gather`` is :meth:`gossip.communication.row_collectives.RowCollectives.begin_gather` of the ranks that have them.
    """

    def __init__(self, compression: Compression, place: int, num_parts: int, gather: Gather) -> None:
        self._compression = compression
        self.place, self.num_parts, self.gather = place, num_parts, gather
        self.delivers = compression.delivers

    def check(self, topology: Topology) -> None:
        self._compression.check(topology)

    def codec(self, bucket: BucketShape, rank: int) -> Codec:
        start = bucket.start
        assert start is not None
        part = part_of(bucket.numel, self.place, self.num_parts)
        shape = BucketShape(bucket.index, start[part], memory=bucket.memory, start=start[part], clip=bucket.clip)
        return _PartCodec(self, self._compression.codec(shape, rank), part, bucket)

    def describe(self) -> str:
        return self._compression.describe()


class _PartCodec(Codec):
    """The codec of one part of a bucket; what has arrived of all parts is gathered.

    No exchange ends before its messages have arrived: what allows that cannot be combined with a mesh. No rank has the
    group's message as one tensor (:attr:`sent`).
    """

    def __init__(self, compression: PartitionedCompression, codec: Codec, part: slice, bucket: BucketShape) -> None:
        self._compression, self._codec, self._part, self._bucket = compression, codec, part, bucket
        self._step = 0

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        self._step = step
        return self._codec.turns(values[self._part], round_, step)

    def completed(self, arrival: Arrival) -> Arrival:
        bucket, parts = self._bucket, self._compression
        size = chunk_length(bucket.numel, parts.num_parts)
        rows = torch.zeros(parts.num_parts, size, dtype=bucket.accumulation_dtype, device=bucket.device)
        own = rows[parts.place]
        for part, difference in arrival.parts:
            own[part] = difference
        if not arrival.is_finite:
            own.fill_(torch.nan)  # all ranks of the group refuse it, or none
        what = f"step {self._step}, bucket {bucket.index}: gathering what arrived at the ranks of the group"
        parts.gather(rows, what)()
        return Arrival.of(rows.view(-1)[: bucket.numel])

    def state_dict(self) -> dict[str, Any]:
        return self._codec.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._codec.load_state_dict(state)


def part_of(numel: int, place: int, num_parts: int) -> slice:
    """Return which of a bucket's values make up a part; none if there are fewer values than parts."""
    size = chunk_length(numel, num_parts)
    return slice(min(place * size, numel), min((place + 1) * size, numel))
