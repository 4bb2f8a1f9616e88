"""Whether a process on another machine is alive: its kernel closes its connections, however it ends.

Each process has a listening socket that is never accepted from, and connects to those of the others as soon as it knows
them. The remote kernel completes a connection without the process, however busy or frozen that is, and closes it when
the process ends. A connection that could not be made is no evidence: something between the two machines may have
refused it.
"""

import contextlib
import errno
import functools
import ipaddress
import os
import select
import socket
import time
from collections.abc import Iterable

import torch.distributed as dist

from gossip.communication.liveness.process_liveness import Process
from gossip.communication.membership import innermost

_BACKLOG = 4096  # the kernel may allow less; a process that finds it full learns nothing
_CONNECTING_PATIENCE_S = 1.0

_listening: dict[str, socket.socket] = {}  # by address; they end with the process
_connections: dict[Process, socket.socket] = {}
_gone: set[Process] = set()
_refusing: set[Process] = set()


def listen(store: dist.Store | None) -> tuple[str, int]:
    """Make this process listen, once, where every process that can reach the store's host can reach it. Local.

    Returns its address and port. The process does not listen, and the address is empty, if the address would be a
    loopback one, or if the store has no host (a file, a table in memory): then either all ranks are on one machine, or
    it is unknown how they reach it.
    """
    with contextlib.suppress(OSError):  # this is a convenience: the time-out applies in any case
        family, host = own_address(store)
        if host:
            if host not in _listening:
                _leave_listening_to_parent()
                _listening[host] = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
            return host, int(_listening[host].getsockname()[1])
    return "", 0


def connect(processes: Iterable[Process]) -> None:
    """Connect to each listening process, unless that has been done. Takes at most a second. Local."""
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
            failure = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure == 0 and _is_connected(connection):
                _connections[process] = connection
            else:
                _refusing.update([process] if failure == errno.ECONNREFUSED else ())
                connection.close()
    for _, connection in connecting.values():
        connection.close()


def is_gone(process: Process) -> bool:
    """Return whether a process that was connected to has ended. Does not block."""
    if process in _connections and process not in _gone:
        try:
            if not _connections[process].recv(1):
                _gone.add(process)
        except ConnectionResetError:
            _gone.add(process)
        except OSError:
            pass  # nothing has arrived, or the process is no longer reachable
    return process in _gone


def has_refused(process: Process) -> bool:
    """Return whether nobody listened where a process does as long as it lives, or something in between said so."""
    return process in _refusing


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


@functools.cache
def _leave_listening_to_parent() -> None:
    """Close listeners in a forked child, where an open socket would make its parent seem alive."""

    def leave() -> None:
        for listener in _listening.values():
            listener.close()
        _listening.clear()

    os.register_at_fork(after_in_child=leave)


def own_address(store: dist.Store | None) -> tuple[int, str]:
    """Return the family and the address by which this machine reaches the store's host; empty if it is a loopback."""
    server = None if store is None else innermost(store)
    if not isinstance(server, dist.TCPStore):
        return socket.AF_INET, ""
    family, kind, _, _, target = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: it only looks up the route
        host = str(probe.getsockname()[0])
    return family, "" if ipaddress.ip_address(host.partition("%")[0]).is_loopback else host
