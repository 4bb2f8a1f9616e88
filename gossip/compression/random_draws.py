"""Random numbers that depend only on seed, step, bucket and, where ranks must differ, rank."""

from __future__ import annotations

import hashlib

import torch


def check_seed(seed: object) -> None:
    """Refuse, by TypeError, what is not an integer."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an integer, got {seed!r}")


def generator(seed: int, *place: int) -> torch.Generator:
    """Return a CPU generator that is the same for the same numbers on every machine."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    source = torch.Generator()
    source.manual_seed(int.from_bytes(digest[:8], "little"))
    return source
