"""Waiting for events of several sockets, which other threads can interrupt."""

import contextlib
import selectors
import socket
import time

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Watched:
    """A socket that is watched.

    Attributes
    ----------
    socket : socket
        The socket, which does not block.
    watched : int
        The events that are watched.
    sent_at : float
        When it last accepted data, by ``time.monotonic()``.
    """

    def __init__(self, watched: socket.socket) -> None:
        watched.setblocking(False)
        self.socket = watched
        self.watched, self.sent_at = 0, 0.0


class Watcher:
    """Waits for events of sockets, in one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._bell = socket.socketpair()
        for end in (self._wake, self._bell):
            end.setblocking(False)
        self._is_awake = False
        self._selector.register(self._bell, READ, None)

    def watch(self, watched: Watched, events: int) -> None:
        """Wait for exactly these events of a socket."""
        if events == watched.watched:
            return
        if events & ~watched.watched & WRITE:
            watched.sent_at = time.monotonic()  # it could not have accepted anything before
        if not watched.watched:
            self._selector.register(watched.socket, events, watched)
        elif events:
            self._selector.modify(watched.socket, events, watched)
        else:
            self._selector.unregister(watched.socket)
        watched.watched = events

    def wait(self, timeout_s: float) -> list[tuple[Watched, int]]:
        """Return the sockets that have events, and which; wait for one, for :meth:`ring`, or for ``timeout_s``."""
        selected = [(key.data, events) for key, events in self._selector.select(timeout_s)]
        if any(watched is None for watched, _ in selected):
            with contextlib.suppress(OSError):
                self._bell.recv(4096)
            self._is_awake = False
        return [(watched, events) for watched, events in selected if watched is not None]

    def ring(self) -> None:
        """Let the thread that waits go on. Called in any thread."""
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(OSError):
                self._wake.send(b"\0")

    def close(self) -> None:
        """Close what belongs to it, not the sockets that are watched."""
        for end in (self._selector, self._wake, self._bell):
            end.close()
