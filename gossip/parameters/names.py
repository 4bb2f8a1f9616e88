"""Names of parameters and buffers: those that they have without ``torch.compile``, whatever part was compiled."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gossip.private_torch import own_buffers

_COMPILED = "_orig_mod"  # a compiled module has the bare one as its only child, of this name
_INSIDE_A_NAME = re.compile(rf"(?<!\w){_COMPILED}\.")


def bare(text: str) -> str:
    """Return a name, or a text with names, as it is where nothing is compiled."""
    return _INSIDE_A_NAME.sub("", text) if _COMPILED in text else text


def bare_of_module(name: str) -> str:
    """Return the name of a submodule, which may itself be a compiled one's child, as :func:`bare` does."""
    return bare(f"{name}.").removesuffix(".")


def bare_module(module: nn.Module) -> nn.Module:
    """Return the module that was compiled, or the module itself."""
    inner = getattr(module, _COMPILED, module)
    assert isinstance(inner, nn.Module)
    return inner


def named_parameters(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the module's parameters under their bare names."""
    named = module.named_parameters(remove_duplicate=remove_duplicate)
    return ((bare(name), parameter) for name, parameter in named)


def named_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the module's buffers under their bare names."""
    return ((bare(name), buffer) for name, buffer in module.named_buffers())


def buffer_named(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the buffer of a bare name, or None if it is gone."""
    *path, key = name.split(".")
    owner: Any = bare_module(module)
    for part in path:
        child = getattr(owner, part, None)
        if not isinstance(child, nn.Module):
            return None
        owner = bare_module(child)
    return own_buffers(owner).get(key)


def in_words(name: str) -> str:
    """Return a submodule by its name, and the module itself, whose name is empty, without one."""
    return f"module {name!r}" if name else "module"
