"""Random numbers that depend only on seed, step, bucket and, where ranks must differ, rank."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *place: int) -> torch.Generator:
    """Return a CPU generator that is the same for the same numbers on every machine."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    source = torch.Generator()
    source.manual_seed(int.from_bytes(digest[:8], "little"))
    return source
