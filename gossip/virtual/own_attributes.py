"""Protection against setting attributes that would have no effect."""

from __future__ import annotations

from typing import Any

from torch import nn


class OwnAttributes:
    """Allows only existing attributes to be set once it has its ``module``: others were meant for the module."""

    module: nn.Module

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "module" in own and name not in own and not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; if it is the module's, set it there "
                f"(workers.module.{name} = ...) before the first call"
            )
        super().__setattr__(name, value)
