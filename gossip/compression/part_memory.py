"""Memory for a moment, and passes over it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

_thread = threading.local()


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a moment. On a CPU the thread's own, one piece per dtype: it stays in the cache."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    pieces: dict[torch.dtype, torch.Tensor] = _thread.__dict__.setdefault("pieces", {})
    numel = math.prod(shape)
    if dtype not in pieces or pieces[dtype].numel() < numel:
        pieces[dtype] = torch.empty(numel, dtype=dtype)
    return pieces[dtype][:numel].view(shape)


def scratch_bytes() -> int:
    """What this thread keeps as scratch: of a few parts, whatever the size of the model."""
    pieces: dict[torch.dtype, torch.Tensor] = _thread.__dict__.get("pieces", {})
    return sum(piece.nbytes for piece in pieces.values())


def all_finite(values: torch.Tensor) -> bool:
    """Whether all are finite; of values that are, one pass over the memory and no more."""
    total = float(values.sum())  # of finite values it may overflow
    return total - total == 0.0 or bool(values.isfinite().all())
