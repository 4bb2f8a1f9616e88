"""The key-value store of a running training that this process joins."""

from __future__ import annotations

import torch.distributed as dist

from gossip.communication.membership import innermost

_store: dist.Store | None = None


def join(store: dist.Store) -> None:
    """Let the next model of this process join the training that uses this store. Local."""
    global _store
    _store = innermost(store)


def joined() -> dist.Store | None:
    """Return the store of the training that this process joins, or None. Local."""
    return _store
