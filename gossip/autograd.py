"""What the engine needs to know of torch's autograd."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gossip.errors import GossipError


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and objects, each once."""
    seen: set[int] = set()
    pending = [output]
    while pending:
        for leaf in tree_leaves(pending.pop()):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module) and id(leaf) not in seen:
                seen.add(id(leaf))
                pending.extend(vars(leaf).values())


def refuse_compiled_autograd() -> None:
    """Raise where no hook would be called."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.compiled_autograd:
        raise GossipError(
            "torch._dynamo.config.compiled_autograd is on: it compiles backward passes without the hooks that make the "
            "steps; turn it off, or wrap the module with step_in_backward=False"
        )
