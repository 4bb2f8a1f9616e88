"""Mixed precision's GradScaler with an optimizer whose ``step()`` exchanges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gossip import GossipDataParallel
from gossip.private_torch import SUPPORTS_SCALING


@contextlib.contextmanager
def unscaled_by_owner(optimizer: Optimizer) -> Iterator[None]:
    """Keep the optimizer within the block from claiming that its ``step()`` divides by the scale. Local.

    An optimizer that belongs to a model makes this claim so that a GradScaler steps it even after an overflow;
    Lightning refuses to clip the gradients of an optimizer that makes it.
    """
    claimed = getattr(optimizer, SUPPORTS_SCALING, False)
    setattr(optimizer, SUPPORTS_SCALING, False)
    try:
        yield
    finally:
        setattr(optimizer, SUPPORTS_SCALING, claimed)


def step_scaled(scaler: GradScaler, model: GossipDataParallel, optimizer: Optimizer, **kwargs: Any) -> Any:
    """Let the scaler step one of the model's optimizers, and update the scaler once per step of the model. Local."""
    step = model.step
    output = scaler.step(optimizer, **kwargs)
    if model.step > step:
        scaler.update()
    return output
