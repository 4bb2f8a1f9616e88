"""A wrapper that looks like the module inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class ModuleFace(nn.Module):
    """Shows the attributes, names and state of ``self.module`` as its own.

    Attributes
    ----------
    module : Module
    """

    module: nn.Module

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

    @property
    def training(self) -> bool:
        """The module's own mode."""
        return self.module.training if "module" in self.__dict__.get("_modules", {}) else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__.get("_modules", {}):
            self.module.training = mode

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, with its own names. Local."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's own, with its own names. Local."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own, with its own keys. Local."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the module; keys that all begin with ``module.`` are taken too. Local."""
        if state_dict and all(key.startswith("module.") for key in state_dict):
            own = self.module.state_dict().keys()
            if not any(key in own for key in state_dict):
                state_dict = {key.removeprefix("module."): value for key, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def _rename_nested_keys(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    """In a larger module's state_dict the wrapped module's keys stand without ``module.``, as they were written."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
