"""Attributes that can be set, and those that would do nothing."""

from __future__ import annotations

from typing import Any

from torch import nn


class OwnAttributes:
    """Lets only attributes be set that are there, once it has its ``module``: another was meant for that one."""

    module: nn.Module

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "module" in own and name not in own and not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}; if it is the module's, set it there "
                f"(workers.module.{name} = ...) before the first call"
            )
        super().__setattr__(name, value)
