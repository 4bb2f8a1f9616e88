"""A wrapper that behaves like the module inside it, and its protection against another kind of data parallelism."""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from gossip.errors import GossipError
from gossip.parameters.names import bare, bare_module, bare_of_module
from gossip.private_torch import active_ddp, is_sharded

_REMEDY = (
    "Call the model itself. Libraries that wrap models take the bare module: with accelerate, use "
    "gossip.integrations.accelerate.prepare(accelerator, module, ...) instead of accelerator.prepare(...); with "
    'transformers, gossip.integrations.transformers.GossipTrainer; with Lightning, Trainer(strategy="gossip") after '
    "import gossip.integrations.lightning"
)


class Outermost(nn.Module):
    """A model that refuses to run inside DistributedDataParallel, FullyShardedDataParallel and DataParallel.

    They would train the same parameters in their own way at the same time, without an error.
    """

    module: nn.Module

    def check_outermost(self, *, is_sharded_inside: bool = False) -> None:
        """Raise if this forward pass belongs to another wrapper. Local.

        Raises GossipError: it does; the text says what to do, also with libraries that wrap models.
        """
        outer = active_ddp()
        if outer is not None and any(part is self for part in outer.modules()):
            self._refuse("a DistributedDataParallel, which all-reduces the gradients that are exchanged here by gossip")
        if is_sharded(self) or (is_sharded(self.module) and not is_sharded_inside):
            self._refuse("FullyShardedDataParallel or fully_shard, which leave each rank only a part of each parameter")

    def _replicate_for_data_parallel(self) -> NoReturn:
        self._refuse("a torch.nn.DataParallel, which runs copies on several devices: start one process per device")

    def _refuse(self, by: str) -> NoReturn:
        raise GossipError(f"this {type(self).__name__} is wrapped by {by}. {_REMEDY}")


class ModuleProxy(nn.Module):
    """Presents the attributes, names and state of ``self.module`` as its own, and writes to them.

    Once it has a module, an attribute is set where it would be read: in the wrapper if that has it, otherwise in the
    module. An attribute that neither has is set in the module, which may want to read it; but a name that begins with
    an underscore, and is neither a parameter nor a module, is what libraries note about the object that they hold, and
    stays in the wrapper.
    """

    module: nn.Module
    """The wrapped one; it can only be replaced by one around it with the same parameters, as by ``torch.compile``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(_rename_nested_keys)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self._modules:
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self._found_module()
        if module is not None and name == "module":
            _check_is_around(value, module)
        elif module is not None and not self._is_own(name, value, module):
            setattr(module, name, value)
            return
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        module = self._found_module()
        if module is None or name == "module" or name in self.__dict__ or hasattr(type(self), name):
            super().__delattr__(name)
        else:
            delattr(module, name)

    def _found_module(self) -> nn.Module | None:
        modules: dict[str, nn.Module] = self.__dict__.get("_modules", {})
        return modules.get("module")

    def _is_own(self, name: str, value: Any, module: nn.Module) -> bool:
        if name in self.__dict__ or hasattr(type(self), name):
            return True
        return name.startswith("_") and not isinstance(value, nn.Parameter | nn.Module) and not hasattr(module, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child to the module itself. Local."""
        self.module.add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter in the module itself. Local."""
        self.module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register a buffer in the module itself. Local."""
        self.module.register_buffer(name, tensor, persistent)

    @property
    def training(self) -> bool:
        """The mode of the module."""
        module = self._found_module()
        return module.training if module is not None else True

    @training.setter
    def training(self, mode: bool) -> None:
        if (module := self._found_module()) is not None:
            module.training = mode

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the module's own parameters under the module's own names. Local."""
        return ((bare(name), parameter) for name, parameter in self.module.named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the module's own buffers under the module's own names. Local."""
        return ((bare(name), buffer) for name, buffer in self.module.named_buffers(*args, **kwargs))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the module's gradients. Local: reads no values, and waits for none."""
        self.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's own state_dict with its own keys, without those of ``torch.compile``. Local."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        prefix: str = args[1] if len(args) > 1 else kwargs.get("prefix", "")  # that of a module around this one
        _rename(state, prefix, bare)
        _rename(getattr(state, "_metadata", {}), prefix, bare_of_module)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict into the module. Local.

        Keys that all begin with ``module.``, and keys that ``torch.compile`` has changed, are accepted too.
        """
        if state_dict and all(key.startswith("module.") for key in state_dict):
            own = self.state_dict().keys()
            if not any(bare(key) in own for key in state_dict):
                state_dict = {key.removeprefix("module."): value for key, value in state_dict.items()}
        if keys := _changed_keys(self.module, state_dict):
            state_dict = {keys.get(key, key): value for key, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


class ForwardOfModule:
    """A ``forward`` method that an instance can override by ``_forward``; see :func:`forward_like`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, model: nn.Module | None, owner: type | None = None) -> Callable[..., Any]:
        if model is None:
            return self._function
        return types.MethodType(model.__dict__.get("_forward", self._function), model)


def forward_like(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return a copy of the method with the signature of ``module.forward``.

    It is for code that inspects the signature, as ``transformers.Trainer`` does to select the columns of a dataset.
    """
    try:
        signature = inspect.signature(bare_module(module).forward)  # a compiled one's own is generic
    except (TypeError, ValueError):  # for a function that is not written in Python
        return function
    alike = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    functools.update_wrapper(alike, function)
    del alike.__dict__["__wrapped__"]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    alike.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    return alike


def _check_is_around(outer: Any, module: nn.Module) -> None:
    if (
        not isinstance(outer, nn.Module)
        or all(part is not module for part in outer.modules())
        or set(outer.parameters()) != set(module.parameters())
    ):
        raise ValueError(
            f"module cannot be replaced by a {type(outer).__name__} whose parameters are not those that were wrapped; "
            "close() the model and wrap the other module"
        )


def _rename_nested_keys(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Insert ``module.`` into keys of a larger module's state_dict, where it was left out when they were written."""
    inner = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    keys = _changed_keys(model.module, inner)
    for key in inner:
        state_dict[f"{prefix}module.{keys.get(key, key)}"] = state_dict.pop(prefix + key)


def _rename(entries: dict[str, Any], prefix: str, rename: Callable[[str], str]) -> None:
    """Rename what follows the prefix in keys that have it; the order is kept."""
    items = list(entries.items())
    entries.clear()
    for key, value in items:
        entries[prefix + rename(key.removeprefix(prefix)) if key.startswith(prefix) else key] = value


def _changed_keys(module: Any, keys: Iterable[str]) -> dict[str, str]:
    """Return under which other keys the module has these, because parts of it were compiled since, or not any more."""
    own = {bare(key): key for key in module.state_dict()}
    return {key: own[bare(key)] for key in keys if own.get(bare(key), key) != key}
