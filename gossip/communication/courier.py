"""Two threads that keep communication out of the training thread's way."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

Works = Sequence[tuple[str, dist.Work]]
"""Handles of pending operations, each with the words that name whom it waits for."""
Talk = Iterator[Works]
"""Posts operations and yields their handles; goes on once they have ended."""


class Courier:
    """Posts communication, and waits for it, in the order in which it was given.

    One daemon thread posts: a gloo send or receive of a large message can hold its caller for as long as the socket is
    busy, and that would be time taken from the backward pass. One daemon thread waits: a thread that is blocked in
    ``Work.wait`` cannot be interrupted, not even by Ctrl-C, and gloo's point-to-point handles answer
    ``is_completed()`` with False until somebody has waited for them. What a talk posts first is posted in the order of
    the talks; what it posts after that, by the thread that waits, once its turn has come: on all ranks in one order.
    Whoever needs the outcome waits on a :class:`Ticket`, with a time-out of their own.
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

    def submit(self, talk: Talk) -> Ticket:
        """Begin ``talk`` after everything submitted before, wait for what it yields, and so on; all in the back."""
        ticket = Ticket(talk)
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
    """The outcome of a talk, once there is one.

    Attributes
    ----------
    error : Exception or None
        What the talk, or the first work that failed, raised.
    awaited : str
        The name of the work that is being waited for, or that failed.
    finished_at : list of float
        ``time.perf_counter()`` when each of the works was seen to have ended, in their order.
    """

    def __init__(self, talk: Talk) -> None:
        self._talk: Talk | None = talk
        self._works: Works | None = None
        self._done = threading.Event()
        self.error: Exception | None = None
        self.awaited = "its own turn to be posted"
        self.finished_at: list[float] = []

    def wait(self, timeout: timedelta) -> bool:
        """Whether it has ended, well or not, within ``timeout``. Ctrl-C gets through."""
        return self._done.wait(timeout.total_seconds())

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def post(self) -> None:
        """Run by the posting thread."""
        assert self._talk is not None
        try:
            self._works = next(self._talk, None)
        except Exception as error:
            self.error = error

    def serve(self) -> None:
        """Run by the waiting thread."""
        assert self._talk is not None
        try:
            while self._works is not None:
                for self.awaited, work in self._works:  # noqa: B020 -- read by others meanwhile
                    work.wait()
                    self.finished_at.append(time.perf_counter())
                self._works = next(self._talk, None)
        except Exception as error:
            self.error = error
        self._talk = self._works = None
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
