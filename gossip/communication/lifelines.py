"""Whether a process on another machine still lives: its kernel closes its connections, however it ends.

Each process has a socket listen that nobody ever answers, and connects to those of the others as soon as it knows them.
The kernel over there takes a connection without the process, however busy or frozen that is, and closes it when the
process ends. A connection that could not be made tells nothing: something between the two may have refused it.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import select
import socket
import time
from collections.abc import Iterable

import torch.distributed as dist

from gossip.communication.membership import innermost
from gossip.communication.process_states import Process

_BACKLOG = 4096  # the kernel may allow less; who finds it full learns nothing
_CONNECTING_PATIENCE_S = 1.0

_listening: dict[str, socket.socket] = {}  # by address; they end with the process
_connections: dict[Process, socket.socket] = {}
_gone: set[Process] = set()


def listen(store: dist.Store | None) -> tuple[str, int]:
    """Have a socket of this process listen where whoever reaches the store's host can reach it, once for all. Local.

    Returns its address and port. Nothing listens, and the address is empty, if it would be a loopback one, or if the
    store has no host (a file, a table in memory): then all ranks are on one machine, or nobody knows how they reach it.
    """
    with contextlib.suppress(OSError):  # it is a convenience: the time-out comes in any case
        family, host = own_address(store)
        if host:
            if host not in _listening:
                _leave_listening_to_parent()
                _listening[host] = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
            return host, int(_listening[host].getsockname()[1])
    return "", 0


def connect(processes: Iterable[Process]) -> None:
    """Connect to each process that listens, unless that has been done. Takes a second at most. Local."""
    poll = select.poll()
    connecting: dict[int, tuple[Process, socket.socket]] = {}
    for process in processes:
        if process.host and process not in _connections:
            connection = socket.socket(socket.AF_INET6 if ":" in process.host else socket.AF_INET, socket.SOCK_STREAM)
            connection.setblocking(False)
            connection.connect_ex((process.host, process.port))
            poll.register(connection, select.POLLOUT)
            connecting[connection.fileno()] = process, connection
    deadline = time.monotonic() + _CONNECTING_PATIENCE_S
    while connecting and (remaining_s := deadline - time.monotonic()) > 0:
        for number, _ in poll.poll(remaining_s * 1000):
            poll.unregister(number)
            process, connection = connecting.pop(number)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and _is_connected(connection):
                _connections[process] = connection
            else:
                connection.close()
    for _, connection in connecting.values():
        connection.close()


def is_gone(process: Process) -> bool:
    """Whether a process that was connected to has ended. Waits for nothing."""
    if process in _connections and process not in _gone:
        try:
            if not _connections[process].recv(1):
                _gone.add(process)
        except ConnectionResetError:
            _gone.add(process)
        except OSError:
            pass  # nothing has come, or there is no way to it any more
    return process in _gone


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


@functools.cache
def _leave_listening_to_parent() -> None:
    """A forked child that held a socket open would have its parent taken for alive."""

    def leave() -> None:
        for listener in _listening.values():
            listener.close()
        _listening.clear()

    os.register_at_fork(after_in_child=leave)


def own_address(store: dist.Store | None) -> tuple[int, str]:
    """The family and the address by which this machine reaches the store's host; no address if it is a loopback."""
    server = None if store is None else innermost(store)
    if not isinstance(server, dist.TCPStore):
        return socket.AF_INET, ""
    family, kind, _, _, target = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: it asks the routes
        host = str(probe.getsockname()[0])
    return family, "" if ipaddress.ip_address(host.partition("%")[0]).is_loopback else host
