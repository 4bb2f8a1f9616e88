"""Plain data from every rank, as JSON: what a peer sends is never unpickled, because unpickling runs its code."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import Any

from gossip.communication.world import World


def all_gather_json(content: Any, what: str, timeout: timedelta) -> list[Any]:
    """Return every rank's ``content``, by rank. Collective; without a process group, only this process's.

    Numbers, strings, None, lists and dictionaries with strings as keys; a tuple arrives as a list, a float unchanged.
    ``what`` is for error texts.
    """
    with closing(World(timeout)) as world:
        return world.gather_json(content, what)
