"""What a rank updates and exchanges of a module that every rank of its group has whole: rows of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from gossip.communication.world import World
from gossip.errors import GossipError
from gossip.parameters.buckets import describe_tensor
from gossip.parameters.names import named_parameters
from gossip.private_torch import mirror_module
from gossip.sharding.resharding import chunk_length


class ZeroShards(nn.Module):
    """This rank's rows of the parameters that are trained, under the names of the module.

    Its parameters are plain tensors, [rows of a rank, ...], padded with zeros to those of the first rank. Frozen
    parameters and buffers are the module's own.

    Raises ValueError: a parameter cannot be divided; the text names it.

    Attributes
    ----------
    wholes : dict of str to Parameter
        The module's parameters that are trained, by name.
    """

    _module: nn.Module

    def __init__(self, module: nn.Module, world: World) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        self._world = world
        self.wholes: dict[str, nn.Parameter] = {}
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
                replacements[id(whole)] = nn.Parameter(self._rows_of(whole))
        mirror_module(module, self, replacements)
        self._locals = dict(named_parameters(self))
        self._names = {name for name, _ in named_parameters(module)}

    def lengths(self) -> dict[str, tuple[int, int]]:
        """Return by a parameter's name the dimension along which it is divided, and its length there. Local."""
        return {name: (0, whole.shape[0]) for name, whole in self.wholes.items()}

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
            rows.copy_(self._rows_of(whole))

    def unreduced(self) -> dict[str, torch.Tensor]:
        """Return by name the gradients of the module's parameters. Local."""
        return {name: whole.grad for name, whole in self.wholes.items() if whole.grad is not None}

    def restore_unreduced(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give the module's parameters these gradients, and no others. Local."""
        for name, whole in self.wholes.items():
            gradient = gradients.get(name)
            whole.grad = None if gradient is None else gradient.to(whole.device, copy=True)

    @torch.no_grad()
    def push(self, names: Iterable[str], rows: Iterable[Iterable[torch.Tensor]]) -> None:
        """Write gathered ``rows`` of these parameters, by rank, to the module. Local."""
        for name, *of_ranks in zip(names, *rows, strict=True):
            whole = self.wholes[name]
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
