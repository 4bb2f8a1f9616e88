"""Ports for servers that open them later."""

import contextlib
import random
import socket

_PORTS = range(20000, 32000)  # below those that systems give to connections, of which other tests make many meanwhile


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
