"""The key-value store of a training that is under way, which this process joins."""

from __future__ import annotations

import torch.distributed as dist

from gossip.communication.membership import innermost

_store: dist.Store | None = None


def join(store: dist.Store) -> None:
    """Let the next model of this process join the training whose store this is. Local."""
    global _store
    _store = innermost(store)


def joined() -> dist.Store | None:
    """That of the training that this process joins, if it does. Local."""
    return _store
