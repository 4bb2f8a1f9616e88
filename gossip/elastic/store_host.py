"""Whether this process serves the key-value store, which would then end with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from gossip.communication.membership import innermost

_LISTENING = "0A"


def is_kept_here(store: dist.Store) -> bool:
    """Return whether this process listens on the store's port; False if /proc does not show it. Local."""
    server = innermost(store)
    if not isinstance(server, dist.TCPStore):
        return False
    listening = set(_listening(server.port))
    return not listening.isdisjoint(_own_sockets())


def _listening(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port, in this network namespace."""
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _own_sockets() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found = os.readlink(entry)
                if found.startswith("socket:["):
                    yield found.removeprefix("socket:[").removesuffix("]")
