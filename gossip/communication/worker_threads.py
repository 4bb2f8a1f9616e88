"""Threads that keep communication out of the training thread's way."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol

import torch.distributed as dist

from gossip.communication import daemon_threads, forks
from gossip.errors import GossipError


class Waitable(Protocol):
    """What an operation is waited for by: torch's ``Work``, and what is like it."""

    def wait(self) -> object:
        """Return once it has ended; raise if it has failed."""


class Operation(NamedTuple):
    """Something posted, that ends some time.

    Attributes
    ----------
    awaited : str
        Whom it waits for, in words.
    work : Waitable
    num_bytes : int
        What it moves.
    """

    awaited: str
    work: Waitable
    num_bytes: int = 0


class PostingError(RuntimeError):
    """Something could not even be posted.

    Attributes
    ----------
    awaited : str
        Whom it would have waited for, in words.
    cause : Exception
    """

    def __init__(self, awaited: str, cause: Exception) -> None:
        super().__init__(f"posting what waits for {awaited}: {cause}")
        self.awaited = awaited
        self.cause = cause


def posted(awaited: str, post: Callable[[], dist.Work], num_bytes: int = 0) -> Operation:
    """The operation that ``post`` begins.

    Raises
    ------
    PostingError
        ``post`` failed: what is posted to a peer whose connection is closed does at once.
    """
    try:
        return Operation(awaited, post(), num_bytes)
    except Exception as error:
        raise PostingError(awaited, error) from error


Works = Sequence[Operation]
Job = Iterator[Works | None]
"""Posts operations and yields their handles; yields None where it can go on only once all of them have ended."""

#: Something is posted when fewer bytes than this, both ways together, are under way. Enough to keep a fast link busy,
#: and too little to fill the queues between two hosts, whose losses cost more than the pauses.
WINDOW_BYTES = 2**21


class WorkerThreads:
    """Posts communication, and waits for it, in the order in which it was given.

    One daemon thread posts: a gloo send or receive of a large message can hold its caller for as long as the socket is
    busy, and that would be time taken from the backward pass. One daemon thread waits: a thread that is blocked in
    ``Work.wait`` cannot be interrupted, not even by Ctrl-C, and gloo's point-to-point handles answer
    ``is_completed()`` with False until somebody has waited for them. What a job yields before its first None
    is posted ahead, in the order of the jobs, as long as only so much is under way; the rest is posted and waited for
    by a third one, once all of that has ended: on all ranks in one order. So messages follow each other on the wire and
    do not compete, and the wire is not idle while a message is decoded. Whoever needs the outcome waits on a
    :class:`Ticket`, with a time-out of their own.

    Parameters
    ----------
    name : str
        The threads'.
    patience : timedelta
        How long a program that ends waits for what is under way.
    """

    def __init__(self, name: str, patience: timedelta = daemon_threads.CLOSING_PATIENCE) -> None:
        self._to_post: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        posted: _Posted = queue.SimpleQueue()
        to_finish: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        window = _Window(WINDOW_BYTES)
        self._finalizer = end = weakref.finalize(self, self._to_post.put, None)
        lives = {
            "post": partial(_post, self._to_post, posted, window),
            "wait": partial(_wait, posted, window, to_finish),
            "finish": partial(_finish, to_finish),
        }
        self._threads = [
            daemon_threads.start(f"{name}-{what}", run, end=end, patience=patience) for what, run in lives.items()
        ]
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._is_parents = False
        forks.watch(self)

    def submit(self, job: Job) -> Ticket:
        """Begin it after everything submitted before, wait for what it yields, and so on; all in the back.

        Raises
        ------
        GossipError
            The program is over, or this process has been forked.
        """
        if self._is_parents:
            raise GossipError(forks.FORKED)
        if not self._finalizer.alive:
            raise GossipError(
                "communication has ended with the program: in an exit handler that was registered before torch was "
                "imported nothing can be exchanged any more; register it later"
            )
        ticket = Ticket(job)
        self._tickets.add(ticket)
        self._to_post.put(ticket)
        return ticket

    def close(self, patience: timedelta) -> bool:
        """End the threads once what they wait for has ended. Whether that was so within ``patience``.

        If not they are left alone: they are daemons, and a peer that is stuck must not hold this process too. So are
        those of the parent in a forked child.
        """
        if self._is_parents:
            return False
        self._finalizer()
        deadline = time.monotonic() + patience.total_seconds()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def leave_to_parent(self) -> None:
        """See :class:`gossip.communication.forks.Inherited`."""
        self._is_parents = True
        self._finalizer.detach()
        for ticket in list(self._tickets):
            ticket.leave_to_parent()


class Ticket:
    """The outcome of a job, once there is one.

    Attributes
    ----------
    error : Exception or None
        What the job, or the first work that failed, raised.
    awaited : str
        The name of the work that is being waited for, or that failed.
    finished_at : dict of str to float
        ``time.perf_counter()`` when the last operation of a name was seen to have ended, by that name.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._done = threading.Event()
        self.error: Exception | None = None
        self.awaited = "its own turn to be posted"
        self.finished_at: dict[str, float] = {}

    def wait(self, timeout: timedelta) -> bool:
        """Whether it has ended, well or not, within ``timeout``. Ctrl-C gets through."""
        return self._done.wait(timeout.total_seconds())

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def leave_to_parent(self) -> None:
        """In a forked child: it has ended, and not well, unless it had."""
        if not self.done:
            forks.keep(self._job)
            self.error = GossipError(forks.FORKED)
            self._done = threading.Event()  # another thread may have held the lock inside
            self._done.set()

    def post(self) -> Works | None:
        """Run by the posting thread: what comes next, or None if that has to wait for something."""
        try:
            return next(self._job, None) if self.error is None else None
        except Exception as error:
            self._fail(error)
            return None

    def wait_for(self, works: Works) -> None:
        """Run by the thread that waits or finishes; nothing once something has failed."""
        try:
            for operation in works if self.error is None else ():
                self.awaited = operation.awaited
                operation.work.wait()
                self.finished_at[operation.awaited] = time.perf_counter()
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        """Run by the finishing thread: all that was not posted ahead."""
        while self.error is None:
            try:
                works = next(self._job)
            except StopIteration:
                break
            except Exception as error:
                self._fail(error)
            else:
                self.wait_for(works or ())
        self._job = iter(())  # what it holds is needed no more
        self._done.set()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, PostingError):
            self.awaited, error = error.awaited, error.cause
        self.error = error


class _Window:
    """How many bytes are under way."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._under_way = 0
        self._changed = threading.Condition()

    def wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._under_way < self._num_bytes)

    def add(self, num_bytes: int) -> None:
        """Count bytes that are posted, or, below zero, that have arrived."""
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
