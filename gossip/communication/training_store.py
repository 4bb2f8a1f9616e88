"""The training that the next models of this process found or join, and the keys of its store that announce it."""

import itertools
from typing import Any

import torch.distributed as dist

from gossip.communication.authenticated_store import guarded, training_key
from gossip.communication.membership import innermost

STORE = "GOSSIP_STORE"
"""The environment variable that names the store in which this process is to found or join a training."""

COMPLETED, ENDED = "completed", "ended"

_store: dist.Store | None = None
_prefix = ""
_is_founder = has_left = False
_num_models = itertools.count()  # of this process, or since it has founded or joined a training


def begin(store: dist.Store, prefix: str = "", *, is_founder: bool = False) -> None:
    """Let the next models of this process join the training that is announced in this store. Local.

    A founder's train in a process group instead, and others join them later. ``prefix`` distinguishes the training from
    others that are announced there.
    """
    global _store, _prefix, _is_founder, has_left, _num_models
    _store, _prefix, _is_founder, _num_models = innermost(store), prefix, is_founder, itertools.count()
    has_left = False


def joined() -> dist.Store | None:
    """Return the store of the training that this process joins, or None. Local."""
    return None if _is_founder else _store


def is_founder() -> bool:
    """Return whether this process has founded a training, which others expect to be able to join. Local."""
    return _is_founder


def shared_keys(name: str) -> dist.Store | None:
    """Return keys that the founders of a training share with all who join it; None if there are no founders. Local."""
    if _store is None or not _prefix:
        return None
    return guarded(dist.PrefixStore(f"{_prefix}{name}", _store), training_key(), f"{_prefix}{name}")


def leave() -> None:
    """Note that this process has left the training, which goes on: that its function ends says nothing. Local."""
    global has_left
    has_left = True


def note_outcome(outcome: str) -> None:
    """Note that the training is COMPLETED, or that a rank that came to join it found that all others have ENDED."""
    keys: Any = shared_keys("outcome")
    if keys is not None:
        keys.set(outcome, "")


def has_outcome(outcome: str) -> bool:
    """Return whether that was noted. Local."""
    keys: Any = shared_keys("outcome")
    return keys is not None and keys.check([outcome])


def next_announcement() -> str:
    """Return the key that announces the training of the next model; models are counted alike on all ranks. Local."""
    return announcement(_prefix, next(_num_models))


def announcement(prefix: str, number: int = 0) -> str:
    """Return the key that announces a training, or says that its founders have ended before it began."""
    return f"{prefix}gossip/trainings/{number}"
