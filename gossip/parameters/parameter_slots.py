"""Where a module keeps its parameters, and what happens when they are replaced."""

import itertools
import operator
import sys
import traceback
import weakref
from collections.abc import Container

import torch
from torch import nn

from gossip.errors import GossipError
from gossip.parameters.buckets import describe_tensor
from gossip.parameters.names import bare, in_words, named_parameters
from gossip.private_torch import is_sharded, own_children, own_parameters


class ModuleSnapshot:
    """The parameters and submodules of a module and their places; cheap to compare with the module's present ones."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.remember()

    def remember(self) -> None:
        """Record the present parameters and submodules."""
        owners = [entry for entry in self._module.named_modules() if not isinstance(entry[1], torch.jit.ScriptModule)]
        self._tables = [table for _, owner in owners for table in (own_parameters(owner), own_children(owner))]
        self._held = self._present()
        self._places = [
            (own_parameters(owner), key, parameter, bare(f"{prefix}.{key}" if prefix else key))
            for prefix, owner in owners
            for key, parameter in own_parameters(owner).items()
            if parameter is not None
        ]

    def _present(self) -> list[nn.Parameter | nn.Module | None]:
        return [held for table in self._tables for held in table.values()]

    def has_changed(self) -> bool:
        """Return whether a parameter or a submodule was added, replaced or removed since."""
        present = self._present()
        return len(present) != len(self._held) or not all(map(operator.is_, present, self._held))


class ParameterSlots(ModuleSnapshot):
    """Detects parameters that were replaced, removed or added since the module was wrapped.

    The values of a replacement (``load_state_dict(assign=True)``, ``layer.weight = nn.Parameter(...)``) are copied into
    the original parameter, which is in a bucket and known to the optimizer, and which is put back in its place. A
    parameter that was added, by itself or with a module (``module.append(...)``, a new adapter), is refused, frozen or
    not: it is in no optimizer and no bucket, and its values differ between ranks. Modules without parameters may be
    added and removed. No other model may train the parameters whose ids are ``taken``: also those of the ``wrapped``
    module, where the one that is trained is a part of it or stands for it.
    """

    def __init__(self, module: nn.Module, wrapped: nn.Module) -> None:
        super().__init__(module)
        self._known = {id(parameter) for parameter in module.parameters()}
        self.taken = self._known | {id(parameter) for parameter in wrapped.parameters()}
        _open_places.add(self)

    def close(self) -> None:
        """Stop watching, so that the module can be wrapped again. Local."""
        _open_places.discard(self)

    def check(self) -> None:
        """Put the original parameters back, with the new values; cheap if nothing has changed.

        Raises GossipError: a parameter has another dtype, device or shape now, was removed, or is new; the text names
        it.
        """
        if self.has_changed() and not _inside_functional_call():
            self._settle()

    def check_added(self) -> None:
        """Raise like :meth:`check` for an added parameter, but change nothing, as within a backward pass."""
        if self.has_changed() and not _inside_functional_call():
            self._refuse_added({(id(owned), key) for owned, key, _, _ in self._places})

    def check_all(self) -> None:
        """Do what :meth:`check` does, and inspect the whole module."""
        self.check()
        if {id(parameter) for parameter in self._module.parameters()} != self._known:
            self._settle()

    def restore(self) -> None:
        """Put the original parameters back with the new values, whatever else was added or removed, when closing."""
        present = {id(parameter) for parameter in self._module.parameters()}
        for owned, key, parameter, name in self._places:
            found = owned.get(key)
            if found is None or found is parameter or id(parameter) in present:
                continue  # gone, still there, or moved, as a parametrization does
            _adopt(name, parameter, found)
            for other, other_key, _, _ in self._places:
                if other.get(other_key) is found:
                    other[other_key] = parameter

    def _settle(self) -> None:
        self.restore()
        self._refuse_added()
        present = {id(parameter) for parameter in self._module.parameters()}
        for _, _, parameter, name in self._places:
            if id(parameter) not in present:
                raise GossipError(
                    f"parameter {name!r} was removed after the module was wrapped; close() the model and wrap the "
                    "module again"
                )
        self.remember()

    def _refuse_added(self, known_places: Container[tuple[int, str]] = ()) -> None:
        for prefix, owner in self._module.named_modules():
            for key, parameter in own_parameters(owner).items():
                if (
                    parameter is None
                    or id(parameter) in self._known
                    or (id(own_parameters(owner)), key) in known_places
                ):
                    continue
                name = bare(f"{prefix}.{key}" if prefix else key)
                raise GossipError(
                    f"parameter {name!r} was added after the module was wrapped: it would be neither trained nor "
                    "exchanged; add it before wrapping, or close() the model and wrap the module again"
                )


def _inside_functional_call() -> bool:
    """Return whether torch.func.functional_call has temporarily put other tensors into the module."""
    return any(frame.f_code.co_name == "_functional_call" for frame, _ in traceback.walk_stack(sys._getframe()))


_open_places: weakref.WeakSet[ParameterSlots] = weakref.WeakSet()


def check_not_wrapped(module: nn.Module, *, may_be_sharded: bool = False) -> None:
    """Refuse a module whose parameters a model already trains, or that another wrapper synchronises.

    Raises ValueError: a parameter or submodule is refused; the text names it.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{in_words(name)} is a DistributedDataParallel, which would all-reduce the gradients; wrap its .module"
            )
        has_state = any(True for _ in itertools.chain(part.parameters(), part.buffers()))
        if isinstance(part, torch.jit.ScriptModule) and has_state:
            raise ValueError(
                f"{in_words(name)} is TorchScript, whose parameters cannot be watched from Python; wrap the "
                "module that it was made from (with torch.compile for speed), and script or trace it after training"
            )
        if is_sharded(part) and not may_be_sharded:
            raise ValueError(
                f"{in_words(name)} is sharded (FullyShardedDataParallel, fully_shard), so that each rank "
                "holds only a part of the parameters; pass the mesh over whose shard dimension it is sharded, "
                "GossipDataParallel(..., mesh=mesh), or wrap the module without sharding it"
            )
    taken = {parameter for places in _open_places for parameter in places.taken}
    for name, parameter in named_parameters(module):
        if id(parameter) in taken:
            raise ValueError(
                f"parameter {name!r} already belongs to a GossipDataParallel; wrap a module once, or close() the "
                "other model"
            )


@torch.no_grad()
def _adopt(name: str, parameter: nn.Parameter, found: nn.Parameter) -> None:
    if parameter.shape != found.shape or parameter.dtype != found.dtype or parameter.device != found.device:
        raise GossipError(
            f"parameter {name!r} was replaced by one that is {describe_tensor(found)}, but is in its bucket as "
            f"{describe_tensor(parameter)}; close() the model and wrap the module again"
        )
    parameter.copy_(found)
    parameter.requires_grad_(found.requires_grad)
    if found.grad is not None:
        parameter.grad = found.grad
