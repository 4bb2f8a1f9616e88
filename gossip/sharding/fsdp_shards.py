"""What a rank holds of a module to which ``fully_shard`` was applied, as a module of plain parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gossip.errors import GossipError
from gossip.parameters.buckets import MIXABLE_DTYPES
from gossip.parameters.names import named_parameters
from gossip.private_torch import FSDPParameter, call_gradient_hooks, fsdp_modules, fsdp_parameters, mirror_module


class FSDPShards(nn.Module):
    """What this rank holds of a sharded module, under the names of the module.

    Its parameters are plain tensors, [rows of this rank, padded to those of the first rank, ...], in the memory from
    which FSDP gathers. Its buffers are the module's. A gradient that FSDP has reduced over the shard group becomes the
    gradient of the plain parameter, whose hooks are then called.

    All parameters are managed by ``fully_shard`` over one mesh dimension. ValueError if the gradients of one cannot be
    reduced, because they are of another dtype than a bucket may have.
    """

    _module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        sources = {id(each.sharded): each for each in fsdp_parameters(module)}
        _check_gradients(module, sources)
        local_of = {key: nn.Parameter(each.padded(), each.sharded.requires_grad) for key, each in sources.items()}
        mirror_module(module, self, local_of)
        self._shards = [
            (name, sources[id(sharded)], local_of[id(sharded)]) for name, sharded in named_parameters(module)
        ]
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Let FSDP gather from the memory in which the plain parameters lie now, and watch for gradients. Local."""
        for _, each, local in self._shards:
            each.place(local.data)
            if local.requires_grad:
                self._handles.append(each.sharded.register_post_accumulate_grad_hook(partial(_receive, each, local)))

    def reshard(self) -> None:
        """Drop what FSDP has gathered: values are about to change. Local."""
        for part in fsdp_modules(self._module):
            part.reshard()

    def check(self) -> None:
        """Raise GossipError if a parameter was replaced (``assign=True``, ``module.to()``) or unfrozen. Local."""
        for name, each, local in self._shards:
            if each.sharded.requires_grad and not local.requires_grad:
                raise GossipError(
                    f"parameter {name!r} was unfrozen after the module was wrapped, but is in no bucket; close() the "
                    "model and wrap the module again, or let it require a gradient before wrapping and freeze it then"
                )
            if each.address() != local.data_ptr():
                raise GossipError(
                    f"parameter {name!r} has left the memory from which it is exchanged (load_state_dict with "
                    "assign=True, or module.to()); copy values in place, or close() the model and wrap the module again"
                )

    def lengths(self) -> dict[str, tuple[int, int]]:
        """By a parameter's name the dimension along which it is divided, and its whole length there. Local."""
        return {name: (each.dimension, each.sharded.shape[each.dimension]) for name, each, _ in self._shards}

    def close(self) -> None:
        """Remove the hooks; the module keeps its values, in the memory that the plain parameters have now. Local."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for _, each, local in self._shards:
            each.place(local.data)


@torch.no_grad()
def _receive(source: FSDPParameter, local: nn.Parameter, _: torch.Tensor) -> None:
    """Hand a reduced gradient to the plain parameter."""
    gradient = source.take_gradient()
    if gradient is not None:
        local.grad = gradient if local.grad is None else local.grad.add_(gradient)
        call_gradient_hooks(local)


def _check_gradients(module: nn.Module, sources: Mapping[int, FSDPParameter]) -> None:
    """Refuse what ``fully_shard`` could not gather and reduce; it would fail in the middle of a pass."""
    for name, parameter in named_parameters(module):
        dtypes = sources[id(parameter)].dtypes if parameter.requires_grad else ()
        for option, dtype in zip(("param_dtype", "reduce_dtype"), dtypes, strict=False):
            if dtype not in MIXABLE_DTYPES:
                names = ", ".join(str(allowed).removeprefix("torch.") for allowed in MIXABLE_DTYPES)
                raise ValueError(
                    f"parameter {name!r} is sharded with {option} {dtype}; only {names} can be gathered and reduced "
                    "over a shard group: choose one of them in its MixedPrecisionPolicy"
                )
