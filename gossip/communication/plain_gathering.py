"""Plain data from every rank, as JSON: nothing that a peer sends is ever unpickled, for unpickling runs its code."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from gossip.communication.world import World


def gather_plain(content: Any, what: str, timeout: timedelta) -> list[Any]:
    """Every rank's ``content``, by rank. Collective; without a process group, this one's.

    Parameters
    ----------
    content : plain data
        Numbers, strings, None, lists and dictionaries with strings for keys. A tuple arrives as a list; a float arrives
        as it was sent.
    what : str
        What is being done, for the error.
    timeout : timedelta
        How long to wait for the others.

    Raises
    ------
    TypeError
        ``content`` is no plain data.
    ExchangeError
        A rank did not take part in time.
    """
    payload = json.dumps(content).encode()
    world = World(timeout)
    try:
        return [json.loads(data) for data in world.gather_bytes(payload, what)]
    finally:
        world.close()
