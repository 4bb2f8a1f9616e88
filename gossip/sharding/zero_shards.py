"""What a rank updates and exchanges of a module that every rank of its group has whole: rows of each parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gossip.communication.row_collectives import RowCollectives
from gossip.communication.world import World, accumulation_dtype
from gossip.errors import GossipError
from gossip.parameters.buckets import Bucket, describe_tensor
from gossip.parameters.names import named_parameters
from gossip.private_torch import call_gradient_hooks, mirror_module
from gossip.sharding.local_group import Steps
from gossip.sharding.resharding import chunk_length

_MAX_PENDING = 1  # operations that run beside the backward pass; each holds the whole values of a bucket


class ZeroShards(nn.Module):
    """This rank's rows of the parameters that are trained, under the names of the module.

    Its parameters are plain tensors, [rows of a rank, ...], padded with zeros to those of the first rank. Frozen
    parameters and buffers are the module's own.

    Parameters
    ----------
    module : Module
        The whole module.
    world : World
        The ranks of the group.

    Raises
    ------
    ValueError
        A parameter cannot be divided; the text names it.
    """

    _module: nn.Module

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        self._world = world
        self._wholes: dict[str, nn.Parameter] = {}
        replacements: dict[int, nn.Parameter] = {}
        for name, whole in named_parameters(module):
            if whole.dim() == 0 and whole.requires_grad:
                raise ValueError(
                    f'shard="optimizer": parameter {name!r} is a scalar, which cannot be divided among ranks; make it '
                    "a tensor of one element"
                )
            replacements[id(whole)] = whole
            if whole.requires_grad:
                self._wholes[name] = whole
                replacements[id(whole)] = nn.Parameter(self._rows_of(whole))
        mirror_module(module, self, replacements)
        self._locals = dict(named_parameters(self))
        self._names = {name for name, _ in named_parameters(module)}

    def lengths(self) -> dict[str, tuple[int, int]]:
        """Return by a parameter's name the dimension along which it is divided, and its length there. Local."""
        return {name: (0, whole.shape[0]) for name, whole in self._wholes.items()}

    def whole(self, name: str) -> nn.Parameter:
        """Return the module's parameter of that name. Local."""
        return self._wholes[name]

    def check(self) -> None:
        """Raise if a parameter was added, replaced, or unfrozen. Local.

        Raises
        ------
        GossipError
            Names the parameter, and says what to do.
        """
        for name, parameter in named_parameters(self._module):
            whole = self._wholes.get(name)
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
        """Take this rank's rows over from the module's parameters. Local.

        Raises
        ------
        GossipError
            A parameter has another dtype or device now.
        """
        for name, whole in self._wholes.items():
            rows = self._locals[name]
            if whole.dtype != rows.dtype or whole.device != rows.device:
                raise GossipError(
                    f"parameter {name!r} was converted to {describe_tensor(whole)}, but this rank's rows of it are "
                    f"{describe_tensor(rows)}; close() the model and wrap the module again"
                )
            rows.copy_(self._rows_of(whole))

    def unreduced(self) -> dict[str, torch.Tensor]:
        """Return by name the gradients of the module's parameters. Local."""
        return {name: whole.grad for name, whole in self._wholes.items() if whole.grad is not None}

    def restore_unreduced(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give the module's parameters these gradients, and no others. Local."""
        for name, whole in self._wholes.items():
            gradient = gradients.get(name)
            whole.grad = None if gradient is None else gradient.to(whole.device, copy=True)

    @torch.no_grad()
    def push(self, names: Iterable[str], rows: Iterable[Iterable[torch.Tensor]]) -> None:
        """Write gathered rows to the module's parameters. Local.

        Parameters
        ----------
        names : iterable of str
            The parameters.
        rows : iterable of iterable of Tensor
            By rank, the rows of each of them.
        """
        for name, *of_ranks in zip(names, *rows, strict=True):
            whole = self._wholes[name]
            if whole.numel() == 0:
                continue
            for start, part in zip(range(0, whole.shape[0], of_ranks[0].shape[0]), of_ranks, strict=False):
                number = min(part.shape[0], whole.shape[0] - start)
                whole[start : start + number].copy_(part[:number])

    def _rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        return rows_of(whole.detach(), self._world.rank, self._world.world_size)


def rows_of(values: torch.Tensor, place: int, num_shards: int) -> torch.Tensor:
    """Return a copy of the rows of one of ``num_shards`` ranks, padded with zeros to those of the first."""
    size = chunk_length(values.shape[0], num_shards)
    padded = values.new_zeros(size, *values.shape[1:])
    rows = values[place * size : (place + 1) * size]
    padded[: rows.shape[0]].copy_(rows)
    return padded


class GradientDivision:
    """Averages gradients over the ranks of a group, bucket by bucket, and hands each rank its rows.

    A bucket's reduction begins in the backward pass as soon as all of its gradients are complete, in the order of the
    buckets, and runs beside the rest of the pass.

    Parameters
    ----------
    shards : ZeroShards
        The shards that receive the averaged gradients.
    buckets : iterable of Bucket
        The buckets of the shards' parameters, in launch order.
    world : World
        The ranks of the group.
    rows : RowCollectives
        Sums their rows.
    steps : Steps
        What makes the steps.
    """

    def __init__(
        self, shards: ZeroShards, buckets: Iterable[Bucket], world: World, rows: RowCollectives, steps: Steps
    ) -> None:
        self._shards, self._world, self._rows = shards, world, rows
        self._buckets = list(buckets)
        self._steps = steps
        self._begin_pass()
        self._pending: deque[Callable[[], None]] = deque()
        self._handles: list[RemovableHandle] = []
        for index, bucket in enumerate(self._buckets):
            for name in bucket.names:
                hook = partial(self._on_whole_gradient, index, name)
                self._handles.append(shards.whole(name).register_post_accumulate_grad_hook(hook))

    def _on_whole_gradient(self, index: int, name: str, _: torch.Tensor) -> None:
        if not self._steps.on_shared_gradient():
            return
        if index < self._num_begun:
            self._steps.refuse_late_gradient(index, name)
        self._has_gradients = True
        self._awaited[index].discard(name)
        while self._num_begun < len(self._buckets) and not self._awaited[self._num_begun]:
            self._begin_next()

    def complete(self, where: str, *, is_idle: bool) -> None:
        """Complete all gradients of a step, with zeros for those that this rank does not have. Collective.

        A backward pass that reached no parameter is no step, and does nothing here.
        """
        if not self._has_gradients and not is_idle:
            return
        while self._num_begun < len(self._buckets):
            self._begin_next(where)
        while self._pending:
            self._pending.popleft()()
        self._begin_pass()

    def drop(self) -> bool:
        """Drop the gradients of a backward pass that an exception ended. Local.

        Returns whether that was possible: False if the averaging of some of them had begun.
        """
        if self._num_begun:
            return False
        self._shards.restore_unreduced({})
        self._begin_pass()
        return True

    def _begin_pass(self) -> None:
        self._awaited = [set(bucket.names) for bucket in self._buckets]
        self._num_begun = 0
        self._has_gradients = False

    @torch.no_grad()
    def _begin_next(self, where: str = "in the backward pass") -> None:
        bucket = self._buckets[self._num_begun]
        self._num_begun += 1
        block, size = bucket.block, self._world.world_size
        rows = torch.zeros(
            size, block.numel() + len(bucket.names), dtype=accumulation_dtype(block.dtype), device=block.device
        )
        values, has_gradient = rows[:, : block.numel()], rows[:, block.numel() :]
        has_all = True
        for number, name in enumerate(bucket.names):
            whole = self._shards.whole(name)
            if whole.grad is None:
                has_all = False
                continue
            has_gradient[:, number] = 1.0
            for place in range(size):
                bucket.views(values[place])[number].copy_(rows_of(whole.grad, place, size))
            whole.grad = None
        what = f"bucket {bucket.index}, {where}: averaging gradients over the ranks of the group"
        self._pending.append(partial(self._hand_over, bucket, self._rows.begin_sum(rows, what), has_all))
        while len(self._pending) > _MAX_PENDING:
            self._pending.popleft()()

    @torch.no_grad()
    def _hand_over(self, bucket: Bucket, wait: Callable[[], torch.Tensor], has_all: bool) -> None:
        row = wait()
        mean, counts = row[: bucket.block.numel()].div_(self._world.world_size), row[bucket.block.numel() :]
        is_found = [True] * len(bucket.names) if has_all else (counts > 0).tolist()
        for parameter, gradient, found in zip(bucket.parameters, bucket.views(mean), is_found, strict=True):
            if not found:
                continue
            gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            call_gradient_hooks(parameter)

    def close(self) -> None:
        """Remove the hooks. Local."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class RowGathering:
    """Gathers the rows of a group's ranks, bucket by bucket, into the module's parameters.

    Parameters
    ----------
    shards : ZeroShards
        The shards whose rows are gathered.
    buckets : iterable of Bucket
        The buckets of the shards' parameters.
    world : World
        The ranks of the group.
    rows : RowCollectives
        Gathers their rows.
    """

    def __init__(self, shards: ZeroShards, buckets: Iterable[Bucket], world: World, rows: RowCollectives) -> None:
        self._shards, self._world, self._rows = shards, world, rows
        self._buckets: Mapping[int, Bucket] = {bucket.index: bucket for bucket in buckets}
        self._pending: deque[Callable[[], None]] = deque()

    def begin(self, index: int) -> None:
        """Begin to gather the rows of a bucket, as they are now. Collective."""
        bucket = self._buckets.get(index)
        if bucket is None:
            return  # of buffers
        rows = bucket.block.new_empty(self._world.world_size, bucket.block.numel())
        rows[self._world.rank].copy_(bucket.block)
        wait = self._rows.begin_gather(rows, f"bucket {index}: gathering parameters from the ranks of the group")
        self._pending.append(partial(self._push, bucket, rows, wait))
        while len(self._pending) > _MAX_PENDING:
            self._pending.popleft()()

    def _push(self, bucket: Bucket, rows: torch.Tensor, wait: Callable[[], None]) -> None:
        wait()
        self._shards.push(bucket.names, [bucket.views(row) for row in rows])

    def finish(self) -> None:
        """Wait until all gathering that has begun is complete. Collective."""
        while self._pending:
            self._pending.popleft()()

    def gather(self) -> None:
        """Gather the rows of all buckets. Collective."""
        self.finish()
        for index in self._buckets:
            self.begin(index)
        self.finish()
