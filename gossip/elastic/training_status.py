"""What ranks say of themselves in the key-value store, for ``gossip status``, if the environment wants it."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from gossip.communication.authenticated_store import guarded, read

VARIABLE = "GOSSIP_STATUS"
"""The environment variable by which ranks are told to write their status every second."""
_WHERE = "gossip/status"


class RankStatus(NamedTuple):
    """What a rank says of itself.

    Attributes
    ----------
    number, said_at : int, float
        How many times it has said something, and when, in seconds of a clock of its own.
    generation, members : int, sequence of int
        The generation of the step that it makes, and its ranks.
    waits_for, waited_s : sequence of int, float
        The ranks that it waits for, and for how many seconds.
    lost : sequence of (int, str)
        The ranks that it has lost, in order, and why.
    step, num_late : int
        The steps that it has made, and the late messages that it has combined.
    saved_step : int or None
        The step of the newest checkpoint, on the rank that has completed it.
    """

    number: int
    said_at: float
    generation: int
    members: Sequence[int]
    waits_for: Sequence[int]
    waited_s: float
    lost: Sequence[tuple[int, str]]
    step: int = 0
    num_late: int = 0
    saved_step: int | None = None


def is_wanted() -> bool:
    """Return whether the environment wants ranks to write their status."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def keys_of(store: dist.Store, key: bytes | None, token: str) -> dist.Store:
    """Return the keys of a training in a store, authenticated under ``key`` if there is one. Local."""
    name = f"gossip/training/{hashlib.sha256(token.encode()).hexdigest()[:16]}"
    return guarded(dist.PrefixStore(name, store), key, name)


def register(store: Any, key: bytes | None, token: str, num_ranks: int) -> None:
    """Let readers find a training, which begins with so many ranks; the newest is found first. Local."""
    number = store.add(f"{_WHERE}/number", 1)
    keys: Any = guarded(store, key, _WHERE)
    keys.set(f"{_WHERE}/{number}", json.dumps({"token": token, "num_ranks": num_ranks}))


def trainings(store: Any, key: bytes | None) -> Iterator[tuple[Any, int]]:
    """Yield the keys of each training whose ranks write their status, the newest first, and its number of ranks. Local.

    Raises NotGenuine: the ranks have another key.
    """
    number = int(store.get(f"{_WHERE}/number")) if store.check([f"{_WHERE}/number"]) else 0
    keys: Any = guarded(store, key, _WHERE)
    for each in range(number, 0, -1):
        found = read(keys.get(f"{_WHERE}/{each}"))
        yield keys_of(store, key, found["token"]), found["num_ranks"]


def statuses(keys: Any, num_ranks: int) -> dict[int, RankStatus]:
    """Return the newest status of each rank of a training, those that have joined it included. Local."""
    found: dict[int, RankStatus] = {}
    wanted = set(range(num_ranks))
    while wanted:
        new = {
            rank: RankStatus(**read(keys.get(f"status/{rank}"))) for rank in wanted if keys.check([f"status/{rank}"])
        }
        found |= new
        wanted = set().union(*(status.members for status in new.values())) - found.keys() - wanted
    return found
