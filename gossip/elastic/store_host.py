"""Whether this process serves the key-value store, which would then end with it."""

from __future__ import annotations

import contextlib
import os
import socket

import torch.distributed as dist

from gossip.communication.host.tcp_options import open_sockets
from gossip.communication.membership import innermost


def is_kept_here(store: dist.Store) -> bool:
    """Return whether this process listens on the store's port; False if its open files cannot be listed. Local."""
    server = innermost(store)
    return isinstance(server, dist.TCPStore) and any(_listens(number, server.port) for number, _ in open_sockets())


def _listens(number: int, port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as shared:  # it may be closed meanwhile
        is_listening = shared.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return (
            bool(is_listening)
            and shared.family in (socket.AF_INET, socket.AF_INET6)
            and shared.getsockname()[1] == port
        )
    return False
