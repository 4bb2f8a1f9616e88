"""Where a module keeps its parameters, and what to do when somebody puts others there."""

from __future__ import annotations

import operator
import sys
import weakref
from types import FrameType

import torch
from torch import nn

from gossip.buckets import describe_tensor
from gossip.errors import GossipError


class ParameterPlaces:
    """Notices parameters that were replaced, removed or added since the module was wrapped.

    A replaced one (``load_state_dict(assign=True)``, ``layer.weight = nn.Parameter(...)``) gives its values to the one
    that lives in the buckets and that the optimizer knows, which takes its place again.

    Parameters
    ----------
    module : Module
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known = {id(parameter) for parameter in module.parameters()}
        self._remember()
        _open_places.add(self)

    def close(self) -> None:
        """The module may be wrapped again. Local."""
        _open_places.discard(self)

    def _remember(self) -> None:
        owners = [(prefix, owner) for prefix, owner in self._module.named_modules()]
        self._all_owners = [owner._parameters for _, owner in owners]
        self._sizes = [len(owned) for owned in self._all_owners]
        self._places = [
            (owner._parameters, key, parameter, f"{prefix}.{key}" if prefix else key)
            for prefix, owner in owners
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        named = [(owner._modules, key, child) for _, owner in owners for key, child in owner._modules.items()]
        self._parents = [parent for parent, _, _ in named]
        self._child_keys = [key for _, key, _ in named]
        self._children = [child for _, _, child in named]
        self._owners = [place[0] for place in self._places]
        self._keys = [place[1] for place in self._places]
        self._parameters = [place[2] for place in self._places]

    def check(self) -> None:
        """Put the known parameters back with the new values; cheap if nothing has changed.

        Raises
        ------
        GossipError
            A parameter is of another kind now, was removed, or is new; names it.
        """
        found = map(dict.get, self._owners, self._keys)
        children = map(dict.get, self._parents, self._child_keys)
        if (
            not all(map(operator.is_, found, self._parameters))
            or not all(map(operator.is_, children, self._children))
            or list(map(len, self._all_owners)) != self._sizes
        ) and not _inside_functional_call():
            self._settle()

    def check_all(self) -> None:
        """As :meth:`check`, and look for modules with new parameters too."""
        self.check()
        if {id(parameter) for parameter in self._module.parameters()} != self._known:
            self._settle()

    def _settle(self) -> None:
        present = {id(parameter) for parameter in self._module.parameters()}
        for owned, key, parameter, name in self._places:
            found = owned.get(key)
            if found is parameter or id(parameter) in present:
                continue  # still there, or moved, as a parametrization does
            if found is None:
                raise GossipError(
                    f"parameter {name!r} was removed after the module was wrapped; close() the model and wrap the "
                    "module again"
                )
            _adopt(name, parameter, found)
            for other, other_key, _, _ in self._places:
                if other.get(other_key) is found:
                    other[other_key] = parameter
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in self._known:
                raise GossipError(
                    f"parameter {name!r} was added after the module was wrapped and would not be trained; close() the "
                    "model and wrap the module again"
                )
        self._remember()


def _inside_functional_call() -> bool:
    """Whether torch.func.functional_call has put other tensors into the module for the length of a call."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_functional_call":
            return True
        frame = frame.f_back
    return False


_open_places: weakref.WeakSet[ParameterPlaces] = weakref.WeakSet()


def check_not_wrapped(module: nn.Module) -> None:
    """Refuse a module whose parameters some model trains already.

    Raises
    ------
    ValueError
        Names the parameter.
    """
    for name, each in module.named_modules():
        if isinstance(each, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"module {name or 'itself'!r} is a DistributedDataParallel, which would all-reduce the gradients; wrap "
                "its .module"
            )
    taken = {parameter for places in _open_places for parameter in places._known}
    for name, parameter in module.named_parameters():
        if id(parameter) in taken:
            raise ValueError(
                f"parameter {name!r} belongs to a GossipDataParallel already; wrap a module once, or close() the other"
            )


@torch.no_grad()
def _adopt(name: str, parameter: nn.Parameter, found: nn.Parameter) -> None:
    if parameter.shape != found.shape or parameter.dtype != found.dtype or parameter.device != found.device:
        raise GossipError(
            f"parameter {name!r} was replaced by one that is {describe_tensor(found)}, but lives in its bucket as "
            f"{describe_tensor(parameter)}; close() the model and wrap the module again"
        )
    parameter.copy_(found)
    parameter.requires_grad_(found.requires_grad)
    if found.grad is not None:
        parameter.grad = found.grad
