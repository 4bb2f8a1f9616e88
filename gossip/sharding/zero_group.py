"""Ranks that each have the whole module, and divide its gradients, optimizer state, updates and messages."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from gossip.communication.world import World
from gossip.compression.conversation import accumulation_dtype
from gossip.errors import GossipError
from gossip.parameters.buckets import Bucket, aligned_numel, check_parameters, describe_tensor
from gossip.parameters.names import named_parameters
from gossip.private_torch import call_gradient_hooks, mirror_module
from gossip.sharding.local_group import PartitionedGroup, Steps
from gossip.sharding.shard_mesh import Division, owners_of


class ZeroShards(nn.Module):
    """This rank's rows of the parameters that are trained, under the names of the module.

    Its parameters are plain tensors, [rows of a rank, ...], padded with zeros to those of the first rank. Those that
    are ``undivided`` are whole on one rank and empty on the others. Frozen parameters and buffers are the module's own.

    ``wholes`` are the module's parameters that are trained, by name, and ``divisions`` how each is divided. ValueError
    if one cannot be.
    """

    _module: nn.Module

    def __init__(self, module: nn.Module, world: World, undivided: Container[str]) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        self._world = world
        self.wholes: dict[str, nn.Parameter] = {}
        self.divisions: dict[str, Division] = {}
        trained = ((name, each) for name, each in named_parameters(module) if each.requires_grad)
        sizes = {name: each.numel() for name, each in trained if name in undivided}
        owners, size = owners_of(sizes, world.world_size), world.world_size
        replacements: dict[int, nn.Parameter] = {}
        for name, whole in named_parameters(module):
            if whole.dim() == 0 and whole.requires_grad:
                raise ValueError(
                    f'shard="optimizer": parameter {name!r} is a scalar, which cannot be divided among ranks; make it '
                    "a tensor of one element"
                )
            replacements[id(whole)] = whole
            if whole.requires_grad:
                self.wholes[name] = whole
                divides = partial(Division.owned, owner=owners[name]) if name in owners else partial(Division.even, 0)
                self.divisions[name] = divides(len(whole), num_shards=size)
                num_rows = self.divisions[name].lengths[world.rank]
                replacements[id(whole)] = nn.Parameter(whole.new_zeros(num_rows, *whole.shape[1:]))
        mirror_module(module, self, replacements)
        self._locals = dict(named_parameters(self))
        self._names = {name for name, _ in named_parameters(module)}
        self.pull()

    def check(self) -> None:
        """Raise GossipError if a parameter was added, replaced, or unfrozen. Local."""
        for name, parameter in named_parameters(self._module):
            whole = self.wholes.get(name)
            if name not in self._names:
                raise GossipError(
                    f"parameter {name!r} was added after the module was wrapped, so nothing would train it; close() "
                    "the model and wrap the module again"
                )
            if whole is None and parameter.requires_grad:
                raise GossipError(
                    f'parameter {name!r} was unfrozen, but with shard="optimizer" it has no rows here that could be '
                    "trained; close() the model and wrap the module again"
                )
            if whole is not None and parameter is not whole:
                raise GossipError(
                    f"parameter {name!r} was replaced (load_state_dict with assign=True); copy values in place, or "
                    "close() the model and wrap the module again"
                )

    @torch.no_grad()
    def pull(self) -> None:
        """Take this rank's rows over from the module's parameters; GossipError if one was converted. Local."""
        for name, whole in self.wholes.items():
            rows = self._locals[name]
            if whole.dtype != rows.dtype or whole.device != rows.device:
                raise GossipError(
                    f"parameter {name!r} was converted to {describe_tensor(whole)}, but this rank's rows of it are "
                    f"{describe_tensor(rows)}; close() the model and wrap the module again"
                )
            own = self.divisions[name].part(whole, self._world.rank)
            rows[: len(own)].copy_(own)
            rows[len(own) :].zero_()


class _RowLayout:
    """Where the rows of a bucket's parameters are among those of each rank: for this one, as in the bucket's block."""

    def __init__(self, bucket: Bucket, shards: ZeroShards) -> None:
        self._names, self._shards = bucket.names, shards
        self._places: list[list[int]] = []
        ends = []
        divisions = [shards.divisions[name] for name in bucket.names]
        for rank in range(len(divisions[0].lengths)):
            numels = [
                aligned_numel(division.lengths[rank] * math.prod(parameter.shape[1:]), parameter.dtype)
                for division, parameter in zip(divisions, bucket.parameters, strict=True)
            ]
            *places, end = itertools.accumulate(numels, initial=0)
            self._places.append(places)
            ends.append(end)
        self.width = max(*ends, bucket.block.numel())

    def parts(
        self, number: int, whole: torch.Tensor, rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, of a whole tensor of the bucket, the part of each rank, and where it is in ``rows``, [k, width]."""
        division = self._shards.divisions[self._names[number]]
        for rank, places in enumerate(self._places):
            part = division.part(whole, rank)
            yield part, rows[rank, places[number] : places[number] + part.numel()].view(part.shape)


_MAX_PENDING = 1  # operations that run beside the backward pass; each holds the whole values of a bucket


class ZeroGroup(PartitionedGroup):
    """A group whose ranks each update and exchange some rows of every parameter, and gather them after each step.

    Gradients are averaged over the group by a reduce-scatter of each bucket, and rows are gathered by an all-gather. A
    bucket's reduction begins as soon as all of its gradients are complete, in the order of the buckets; both run beside
    the backward pass. Between steps the module's parameters are whole, current and ordinary tensors; with algorithms
    that combine before the next forward pass, reading them through the model is collective.
    """

    replica: ZeroShards
    _steps: Steps

    def __init__(self, module: nn.Module, world: World, undivided: Container[str] = ()) -> None:
        check_parameters(module)
        super().__init__(module, ZeroShards(module, world, undivided), world)
        self.divisions = self.replica.divisions
        self.described = module  # ranks may have other shapes of it
        self._buckets: list[Bucket] = []
        self._reductions: deque[Callable[[], None]] = deque()
        self._gatherings: deque[Callable[[], None]] = deque()
        self._is_behind = False  # the module's parameters: the rows have newer values
        self._begin_pass()

    def start_equal_(self) -> None:
        super().start_equal_()
        self.replica.pull()

    def attach(self, buckets: Iterable[Bucket], steps: Steps) -> None:
        self._buckets, self._steps = list(buckets), steps
        self._layouts = [_RowLayout(bucket, self.replica) for bucket in self._buckets]
        super().attach(self._buckets, steps)
        for bucket in self._buckets:
            for name in bucket.names:
                hook = partial(self._on_whole_gradient, bucket.index, name)
                self._handles.append(self.replica.wholes[name].register_post_accumulate_grad_hook(hook))
        self._begin_pass()
        self.changed()

    def take_edits(self) -> None:
        if not self._is_behind:
            self.replica.pull()

    def before_forward(self, step: int) -> None:
        del step
        self.replica.check()

    # ------------------------------------------------------------------ gradients

    def _begin_pass(self) -> None:
        self._awaited = [set(bucket.names) for bucket in self._buckets]
        self._num_begun = 0
        self._has_gradients = False

    def _on_whole_gradient(self, index: int, name: str, _: torch.Tensor) -> None:
        if not self._steps.on_shared_gradient():
            return
        if index < self._num_begun:
            self._steps.refuse_late_gradient(index, name)
        self._has_gradients = True
        self._awaited[index].discard(name)
        while self._num_begun < len(self._buckets) and not self._awaited[self._num_begun]:
            self._reduce_next()

    def complete_gradients(self, step: int, *, is_idle: bool = False) -> None:
        """Those that this rank does not have are zeros. A backward pass that reached no parameter is no step."""
        if not self._has_gradients and not is_idle:
            return
        while self._num_begun < len(self._buckets):
            self._reduce_next(f"step {step}")
        _end(self._reductions)
        self._begin_pass()

    def drop_gradients(self) -> bool:
        if self._num_begun:
            return False
        self.restore_unreduced({})
        self._begin_pass()
        return True

    @torch.no_grad()
    def _reduce_next(self, where: str = "in the backward pass") -> None:
        bucket = self._buckets[self._num_begun]
        self._num_begun += 1
        block, layout = bucket.block, self._layouts[bucket.index]
        shape, dtype = (self.num_shards, layout.width + len(bucket.names)), accumulation_dtype(block.dtype)
        rows = torch.zeros(shape, dtype=dtype, device=block.device)
        has_gradient = rows[:, layout.width :]
        has_all = True
        for number, name in enumerate(bucket.names):
            whole = self.replica.wholes[name]
            if whole.grad is None:
                has_all = False
                continue
            has_gradient[:, number] = 1.0
            for part, own in layout.parts(number, whole.grad, rows):
                own.copy_(part)
            whole.grad = None
        what = f"bucket {bucket.index}, {where}: averaging gradients over the ranks of the group"
        self._reductions.append(partial(self._hand_over, bucket, self.rows.begin_sum(rows, what), has_all))
        _end(self._reductions, _MAX_PENDING)

    @torch.no_grad()
    def _hand_over(self, bucket: Bucket, wait: Callable[[], torch.Tensor], has_all: bool) -> None:
        row, width = wait(), self._layouts[bucket.index].width
        mean, counts = row[: bucket.block.numel()].div(self.num_shards), row[width:]
        is_found = [True] * len(bucket.names) if has_all else (counts > 0).tolist()
        for parameter, gradient, found in zip(bucket.parameters, bucket.views(mean), is_found, strict=True):
            if not found:
                continue
            gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            call_gradient_hooks(parameter)

    # ------------------------------------------------------------------ rows

    def updated(self, index: int) -> None:
        if index >= len(self._buckets):
            return  # of buffers
        bucket = self._buckets[index]
        rows = bucket.block.new_empty(self.num_shards, self._layouts[index].width)
        rows[self.place, : bucket.block.numel()].copy_(bucket.block)
        wait = self.rows.begin_gather(rows, f"bucket {index}: gathering parameters from the ranks of the group")
        self._gatherings.append(partial(self._push, bucket, rows, wait))
        _end(self._gatherings, _MAX_PENDING)

    @torch.no_grad()
    def _push(self, bucket: Bucket, rows: torch.Tensor, wait: Callable[[], None]) -> None:
        """Write gathered rows to the module's parameters."""
        wait()
        for number, name in enumerate(bucket.names):
            for part, own in self._layouts[bucket.index].parts(number, self.replica.wholes[name], rows):
                part.copy_(own)

    def finish_step(self) -> None:
        _end(self._gatherings)

    def changed(self) -> None:
        self._is_behind = True
        if not self.world.is_joint:
            self.complete_changes()

    def complete_changes(self) -> None:
        if not self._is_behind:
            return
        self.finish_step()
        for bucket in self._buckets:
            self.updated(bucket.index)
        self.finish_step()
        self._is_behind = False

    # ------------------------------------------------------------------ between steps

    def unreduced(self) -> dict[str, torch.Tensor]:
        return {name: whole.grad for name, whole in self.replica.wholes.items() if whole.grad is not None}

    def restore_unreduced(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for name, whole in self.replica.wholes.items():
            gradient = gradients.get(name)
            whole.grad = None if gradient is None else gradient.to(whole.device, copy=True)


def _end(pending: deque[Callable[[], None]], most_left: int = 0) -> None:
    """End operations in the order in which they began, until so many are left. Collective."""
    while len(pending) > most_left:
        pending.popleft()()
