"""Two threads that keep communication out of the training thread's way."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

Works = Sequence[tuple[str, dist.Work]]
"""Handles of pending operations, each with the words that name whom it waits for."""


class Courier:
    """Posts communication, and waits for it, in the order in which it was given.

    One daemon thread posts: a gloo send or receive of a large message can hold its caller for as long as the socket is
    busy, and that would be time taken from the backward pass. One daemon thread waits: a thread that is blocked in
    ``Work.wait`` cannot be interrupted, not even by Ctrl-C, and gloo's point-to-point handles answer
    ``is_completed()`` with False until somebody has waited for them. Whoever needs the outcome waits on a
    :class:`Ticket`, with a time-out of their own.
    """

    def __init__(self, name: str) -> None:
        self._to_post: _Tickets = queue.SimpleQueue()
        posted: _Tickets = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_post, args=(self._to_post, posted), name=f"{name}-post", daemon=True),
            threading.Thread(target=_wait, args=(posted,), name=f"{name}-wait", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, self._to_post.put, None)

    def submit(self, post: Callable[[], Works]) -> Ticket:
        """Call ``post`` after everything submitted before, then wait for the works that it returns; all in the back."""
        ticket = Ticket(post)
        self._to_post.put(ticket)
        return ticket

    def close(self, patience: timedelta) -> bool:
        """End the threads once what they wait for has ended. Whether that was so within ``patience``.

        If not they are left alone: they are daemons, and a peer that is stuck must not hold this process too.
        """
        self._finalizer()
        deadline = time.monotonic() + patience.total_seconds()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class Ticket:
    """The outcome of some works, once there is one.

    Attributes
    ----------
    error : Exception or None
        What posting, or the first work that failed, raised.
    awaited : str
        The name of the work that is being waited for, or that failed.
    finished_at : list of float
        ``time.perf_counter()`` when each of the works was seen to have ended, in their order.
    """

    def __init__(self, post: Callable[[], Works]) -> None:
        self._post: Callable[[], Works] | None = post
        self._works: Works = ()
        self._done = threading.Event()
        self.error: Exception | None = None
        self.awaited = "its own turn to be posted"
        self.finished_at: list[float] = []

    def wait(self, timeout: timedelta) -> bool:
        """Whether all works have ended, well or not, within ``timeout``. Ctrl-C gets through."""
        return self._done.wait(timeout.total_seconds())

    @property
    def done(self) -> bool:
        """Whether all works have ended, well or not."""
        return self._done.is_set()

    def post(self) -> None:
        """Run by the posting thread."""
        assert self._post is not None
        try:
            self._works = self._post()
        except Exception as error:
            self.error = error
        self._post = None

    def serve(self) -> None:
        """Run by the waiting thread."""
        try:
            for self.awaited, work in self._works:  # noqa: B020 -- read by others meanwhile
                work.wait()
                self.finished_at.append(time.perf_counter())
        except Exception as error:
            self.error = error
        self._works = ()
        self._done.set()


_Tickets = queue.SimpleQueue[Ticket | None]


def _post(tickets: _Tickets, posted: _Tickets) -> None:
    while (ticket := tickets.get()) is not None:
        ticket.post()
        posted.put(ticket)
    posted.put(None)


def _wait(tickets: _Tickets) -> None:
    while (ticket := tickets.get()) is not None:
        ticket.serve()
