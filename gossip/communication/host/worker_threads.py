"""Threads that keep communication from blocking the training thread."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from gossip.communication.host import daemon_threads, forks
from gossip.errors import GossipError


class Waitable(Protocol):
    """A handle that can be waited for: torch's ``Work``, and similar objects."""

    def wait(self) -> object:
        """Return once the operation has ended; raise if it has failed."""


class Operation(NamedTuple):
    """A posted operation, which ends at some time."""

    awaited: str  # what it waits for, in words
    work: Waitable
    num_bytes: int = 0  # that it moves


class PostingError(RuntimeError):
    """An operation could not even be posted; ``cause`` is why, and ``awaited`` what it would have waited for."""

    def __init__(self, awaited: str, cause: Exception) -> None:
        super().__init__(f"posting what waits for {awaited}: {cause}")
        self.awaited = awaited
        self.cause = cause


def posted(awaited: str, post: Callable[[], dist.Work], num_bytes: int = 0) -> Operation:
    """Return the operation that ``post`` starts; PostingError if it fails, as at once for a peer that has closed."""
    try:
        return Operation(awaited, post(), num_bytes)
    except Exception as error:
        raise PostingError(awaited, error) from error


Works = Sequence[Operation]
Job = Iterator[Works | None]
"""Posts operations and yields their handles; yields None where it can proceed only after all of them have ended."""

#: An operation is posted while fewer bytes than this are in flight, in both directions together. This keeps a fast link
#: busy, but does not fill the queues between two hosts, where losses cost more than the pauses.
WINDOW_BYTES = 2**21


class WorkerThreads:
    """Posts communication, and waits for it, in the order in which it was submitted.

    One daemon thread posts: a gloo send or receive of a large message can block its caller for as long as the socket is
    busy, and that time would be taken from the backward pass. One daemon thread waits: a thread that is blocked in
    ``Work.wait`` cannot be interrupted, not even by Ctrl-C, and ``is_completed()`` of gloo's point-to-point handles
    returns False until somebody has waited for them. What a job yields before its first None is posted ahead, in the
    order of the jobs, as long as few enough bytes are in flight. The rest is posted and waited for by a third thread,
    once all of that has ended, in the same order on all ranks. So messages follow each other on the wire and do not
    compete, and the wire is not idle while a message is decoded. Code that needs the outcome waits on a
    :class:`Ticket`, with its own time-out.

    Parameters
    ----------
    name : str
        The prefix of the threads' names.
    patience : timedelta
        How long a program that ends waits for what is in flight.
    """

    def __init__(self, name: str, patience: timedelta = daemon_threads.CLOSING_PATIENCE) -> None:
        self._to_post: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        posted: _Posted = queue.SimpleQueue()
        to_finish: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._queues: tuple[queue.SimpleQueue[Any], ...] = (self._to_post, posted, to_finish)
        window = _Window(WINDOW_BYTES)
        self._finalizer = end = weakref.finalize(self, self._to_post.put, None)
        lives = {
            "post": partial(_post, self._to_post, posted, window),
            "wait": partial(_wait, posted, window, to_finish),
            "finish": partial(_finish, to_finish),
        }
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._error: Exception | None = None
        failed = daemon_threads.weak_call(self, WorkerThreads._fail)
        self._threads = [
            daemon_threads.start(f"{name}-{what}", run, end=end, failed=failed, patience=patience)
            for what, run in lives.items()
        ]
        self._is_parents = False
        forks.watch(self)

    def submit(self, job: Job, then: Callable[[], None] | None = None) -> Ticket:
        """Start a job after all that were submitted before, wait for what it yields, and so on, in the background.

        ``then`` is called by whoever first waits for a job that has succeeded.
        """
        if self._is_parents:
            raise GossipError(forks.FORKED)
        if not self._finalizer.alive:
            raise GossipError(
                "communication has ended with the program: nothing can be exchanged any more in an exit handler that "
                "was registered before torch was imported; register it later"
            )
        ticket = Ticket(job, then)
        self._tickets.add(ticket)
        self._to_post.put(ticket)
        if self._error is not None:
            ticket.fail(self._error)
        return ticket

    def _fail(self, error: Exception) -> None:
        """Fail all jobs, present and future, because one of the threads has failed, and end the others."""
        self._error = error
        for entries in self._queues:
            entries.put(None)
        for ticket in list(self._tickets):
            ticket.fail(error)

    def close(self, patience: timedelta) -> bool:
        """End the threads when what they wait for has ended, and return whether that was within ``patience``.

        Otherwise they are abandoned: they are daemons, and a blocked peer must not block this process too. In a forked
        child, the parent's threads are left alone.
        """
        if self._is_parents:
            return False
        self._finalizer()
        deadline = time.monotonic() + patience.total_seconds()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def leave_to_parent(self) -> None:
        """Implement :class:`gossip.communication.host.forks.Inherited`."""
        self._is_parents = True
        self._finalizer.detach()
        for ticket in list(self._tickets):
            ticket.leave_to_parent()


class Ticket:
    """The outcome of a job, once there is one.

    Attributes
    ----------
    error : Exception or None
        The exception that the job, or the first operation that failed, raised.
    awaited : str
        The name of the operation that is being waited for, or that failed.
    finished_at : dict of str to float
        ``time.perf_counter()`` when the last operation of a name was seen to have ended, by name.
    """

    def __init__(self, job: Job, then: Callable[[], None] | None = None) -> None:
        self._job, self._then = job, then
        self._done = threading.Event()
        self.error: Exception | None = None
        self.awaited = "its own turn to be posted"
        self.finished_at: dict[str, float] = {}

    def wait(self, timeout: timedelta) -> bool:
        """Return whether it has ended, successfully or not, within ``timeout``. Can be interrupted by Ctrl-C."""
        if not self._done.wait(timeout.total_seconds()):
            return False
        if self.error is None and self._then is not None:
            then, self._then = self._then, None
            then()
        return True

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._done.is_set()

    def leave_to_parent(self) -> None:
        """Fail, in a forked child, unless it has already ended."""
        if not self.done:
            forks.keep(self._job)
            self.error = GossipError(forks.FORKED)
            self._done = threading.Event()  # another thread may have held its lock
            self._done.set()

    def fail(self, error: Exception) -> None:
        """Fail, unless it has already ended."""
        if not self.done:
            self.error = error
            self._done.set()

    def post(self) -> Works | None:
        """Return what to post next, or None if that must wait for something. Run by the posting thread."""
        try:
            return next(self._job, None) if self.error is None else None
        except Exception as error:
            self._fail(error)
            return None

    def wait_for(self, works: Works) -> None:
        """Wait for operations; do nothing once one has failed. Run by the thread that waits or finishes."""
        try:
            for operation in works if self.error is None else ():
                self.awaited = operation.awaited
                operation.work.wait()
                self.finished_at[operation.awaited] = time.perf_counter()
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        """Carry out everything that was not posted ahead. Run by the finishing thread."""
        while self.error is None:
            try:
                works = next(self._job)
            except StopIteration:
                break
            except Exception as error:
                self._fail(error)
            else:
                self.wait_for(works or ())
        self._job = iter(())  # releases what it holds
        self._done.set()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, PostingError):
            self.awaited, error = error.awaited, error.cause
        self.error = error


class _Window:
    """The number of bytes in flight, and its limit."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._under_way = 0
        self._changed = threading.Condition()

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < self._num_bytes)

    def add(self, num_bytes: int) -> None:
        """Count bytes that are posted or, if negative, that have arrived."""
        with self._changed:
            self._under_way += num_bytes
            self._changed.notify()


_Posted = queue.SimpleQueue[tuple[Ticket, Works | None] | None]


def _post(tickets: queue.SimpleQueue[Ticket | None], posted: _Posted, window: _Window) -> None:
    while (ticket := tickets.get()) is not None:
        window.wait_for_room()
        while (works := ticket.post()) is not None:
            window.add(sum(operation.num_bytes for operation in works))
            posted.put((ticket, works))
            window.wait_for_room()
        posted.put((ticket, None))
    posted.put(None)


def _wait(posted: _Posted, window: _Window, to_finish: queue.SimpleQueue[Ticket | None]) -> None:
    while (entry := posted.get()) is not None:
        ticket, works = entry
        if works is None:
            to_finish.put(ticket)
        else:
            ticket.wait_for(works)
            window.add(-sum(operation.num_bytes for operation in works))
    to_finish.put(None)


def _finish(tickets: queue.SimpleQueue[Ticket | None]) -> None:
    while (ticket := tickets.get()) is not None:
        ticket.finish()
