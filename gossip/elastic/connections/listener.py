"""The socket at which other ranks connect; strangers who do so cannot use up this process's file descriptors."""

import errno
import os
import resource
import socket
import sys
from collections.abc import Callable

from loguru import logger

from gossip.elastic.connections.peer_connection import PeerConnection
from gossip.elastic.connections.selector import Watched

_BACKLOG = 4096
_MOST_UNKNOWN = 64
_PATIENCE_S = 10.0  # a rank says who it is as soon as it is connected
_SHORT_PATIENCE_S = 1.0  # while others wait for its place
_PAUSE_S = 0.5  # before free descriptors are looked for again
_MOST_RESERVED = 32
_RESERVED = 1 / 8  # of all descriptors
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NONE_WAITS = (errno.EAGAIN, errno.EWOULDBLOCK)
_FAILED_ALONE = (errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR)


class Listener(Watched):
    """Accepts connections. Those that have not yet said who they are have a deadline, and are few.

    A connection that would leave too few descriptors to the rest of this process is not accepted: it waits in the
    kernel's queue. All times are those of ``time.monotonic()``. ``connect`` makes a connection from an accepted socket.
    """

    def __init__(self, member: int, host: str, connect: Callable[[socket.socket], PeerConnection]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(socket.create_server((host, 0), family=family, backlog=_BACKLOG))
        self._member = member
        self._connect = connect
        self.unknown: dict[PeerConnection, float] = {}  # not proved yet to be ranks, and when they were accepted
        self._paused_until = 0.0
        self._has_warned = False

    def is_open(self, now: float) -> bool:
        """Return whether connections that wait can be accepted."""
        return now >= self._paused_until and len(self.unknown) < _MOST_UNKNOWN

    def accept(self, now: float) -> list[PeerConnection]:
        """Accept the connections that wait, as far as there is room for them. Does not block."""
        accepted: list[PeerConnection] = []
        while self.is_open(now):
            try:
                if not _has_spare_descriptors(self.socket):
                    self._pause(now)
                    break
                connected, _ = self.socket.accept()
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._pause(now)
                elif error.errno in _FAILED_ALONE:
                    continue
                elif error.errno not in _NONE_WAITS:
                    raise
                break
            try:
                connection = self._connect(connected)
            except OSError:  # it has been closed meanwhile
                connected.close()
                continue
            self.unknown[connection] = now
            accepted.append(connection)
        return accepted

    def overdue(self, now: float) -> list[PeerConnection]:
        """Return the connections that should have said who they are by now."""
        patience_s = _PATIENCE_S if self.is_open(now) else _SHORT_PATIENCE_S
        return [connection for connection, accepted_at in self.unknown.items() if now - accepted_at > patience_s]

    def forget(self, connection: PeerConnection) -> None:
        """Note that a connection is known by now, or closed."""
        self.unknown.pop(connection, None)

    def close(self) -> None:
        """Stop listening, and close the connections that nobody knows."""
        self.socket.close()
        for connection in self.unknown:
            connection.close()
        self.unknown.clear()

    def _pause(self, now: float) -> None:
        self._paused_until = now + _PAUSE_S
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank {}: nearly all of the {} file descriptors that this process may have are used; until some are "
                "closed, other ranks cannot connect to it; raise the limit of open files (`ulimit -n`)",
                self._member,
                _limit(),
            )


def _has_spare_descriptors(opened: socket.socket) -> bool:
    """Return whether descriptors are left beyond a reserve: the kernel gives out the lowest number that is free."""
    lowest = os.dup(opened.fileno())
    os.close(lowest)
    return lowest < _limit() - min(_MOST_RESERVED, int(_RESERVED * _limit()))


def _limit() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
