"""The options that a strategy for Lightning passes to GossipDataParallel, and those that it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gossip import GossipDataParallel, GossipError

_TAKEN = {
    "module": "the module is what the Trainer or Fabric sets up",
    "optimizer": "the optimizers are those of configure_optimizers() or fabric.setup()",
    "scaler": 'the scaler is that of the precision: pass precision="16-mixed" to the Trainer or Fabric',
}


def check_options(strategy: str, options: Mapping[str, Any]) -> None:
    """Refuse what is not an option of GossipDataParallel, or comes from elsewhere here. Local.

    Raises
    ------
    TypeError
        An option is refused; the text names it, and what is allowed.
    """
    known = [name for name in inspect.signature(GossipDataParallel).parameters if name not in _TAKEN]
    for name in options:
        if name in _TAKEN:
            raise TypeError(f"{strategy}({name}=...): {_TAKEN[name]}; leave it out")
        if name not in known:
            raise TypeError(
                f"{strategy} has no option {name!r}; it takes those of GossipDataParallel ({', '.join(known)}) and of "
                "every Lightning strategy"
            )


def steps_in_backward(options: Mapping[str, Any]) -> bool:
    """Return whether backward passes make the steps, as they do by default."""
    return bool(options.get("step_in_backward", True))


def wrap(
    module: nn.Module, optimizers: Sequence[Optimizer], scaler: GradScaler | None, options: Mapping[str, Any]
) -> GossipDataParallel:
    """Return the model that trains ``module``. Collective."""
    return GossipDataParallel(module, tuple(optimizers) or None, scaler=scaler, **options)


def refuse_clipping(call: str, remedy: str) -> NoReturn:
    """Raise because gradients that were to be clipped have been released.

    Raises
    ------
    GossipError
        Always; the text names the call and the remedy.
    """
    raise GossipError(
        f"{call} finds no gradients: the update was made inside backward; {remedy}, or choose "
        "step_in_backward=False, which keeps gradients until optimizer.step()"
    )
