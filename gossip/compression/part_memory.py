"""Scratch memory of a thread, and passes over memory."""

import math
import threading
from collections.abc import Sequence

import torch

_thread = threading.local()


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return scratch memory. On a CPU it is the thread's own, one piece per dtype, so that it stays in the cache."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    pieces: dict[torch.dtype, torch.Tensor] = _thread.__dict__.setdefault("pieces", {})
    numel = math.prod(shape)
    if dtype not in pieces or pieces[dtype].numel() < numel:
        pieces[dtype] = torch.empty(numel, dtype=dtype)
    return pieces[dtype][:numel].view(shape)


def all_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite; if they are, usually with a single pass over memory."""
    total = float(values.sum())  # it can overflow even if all values are finite
    return total - total == 0.0 or bool(values.isfinite().all())
