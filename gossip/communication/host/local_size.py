"""How many ranks train one replica together, as whoever starts them says."""

import os

LOCAL_SIZE = "GOSSIP_LOCAL_SIZE"
"""The environment variable by which :func:`gossip.launch` tells it; it may be set beside torchrun and srun too."""


def started_local_size() -> int:
    """Return how many consecutive ranks make up a group: by ``GOSSIP_LOCAL_SIZE``, else those of a node."""
    for name in (LOCAL_SIZE, "LOCAL_WORLD_SIZE"):
        if (started := os.environ.get(name)) is None:
            continue
        if not started.isdecimal():
            raise ValueError(f"{name} must be a number of ranks, got {started!r}; unset it, or pass local_size")
        return int(started)
    raise ValueError("local_size is not known: LOCAL_WORLD_SIZE is not set; pass the number of ranks per group")
