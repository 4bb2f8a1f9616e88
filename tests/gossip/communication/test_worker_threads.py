"""What is posted ahead, what has to wait for its turn, and what becomes of errors."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from gossip.communication.device_paths import Message, post_point_to_point
from gossip.communication.host import worker_threads as module
from gossip.communication.host.worker_threads import Job, Operation, WorkerThreads

MANY_BYTES = module.WINDOW_BYTES // 2
TIMEOUT = timedelta(seconds=30)


class Held:
    """An operation that ends when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.released = threading.Event()
        self.error = error

    def wait(self) -> bool:
        assert self.released.wait(TIMEOUT.total_seconds())
        if self.error is not None:
            raise self.error
        return True


class Log:
    """What conversations have posted, in order; and whether the posting thread waits for room."""

    def __init__(self) -> None:
        self.works: list[tuple[str, Held]] = []
        self.is_full = False
        self.changed = threading.Condition()

    def post(self, name: str, num_bytes: int, error: Exception | None = None) -> tuple[Operation]:
        work: Any = Held(error)
        with self.changed:
            self.works.append((name, work))
            self.changed.notify_all()
        return (Operation(name, work, num_bytes),)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.works]

    def comes_to(self, names: list[str], *, is_full: bool = False) -> bool:
        """Whether these get posted; with ``is_full`` no others before something has ended."""
        with self.changed:
            return self.changed.wait_for(
                lambda: self.names == names and (self.is_full or not is_full), TIMEOUT.total_seconds()
            )

    def release(self, name: str) -> None:
        self.works[self.names.index(name)][1].released.set()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def worker_threads(log: Log, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerThreads]:
    class Watched(threading.Condition):
        """Its wait is reached only where there is no room."""

        def wait(self, timeout: float | None = None) -> bool:
            with log.changed:
                log.is_full = True
                log.changed.notify_all()
            ended = super().wait(timeout)
            with log.changed:
                log.is_full = False
            return ended

    class Window(module._Window):
        def __init__(self, num_bytes: int) -> None:
            super().__init__(num_bytes)
            self._changed = Watched()

    monkeypatch.setattr(module, "_Window", Window)
    each = WorkerThreads("test")
    yield each
    assert each.close(TIMEOUT)


def message(log: Log, name: str, num_pieces: int, num_bytes: int = MANY_BYTES) -> Job:
    for piece in range(num_pieces):
        yield log.post(f"{name}{piece}", num_bytes)


def test_pieces_follow_each_other_and_so_do_messages(worker_threads: WorkerThreads, log: Log) -> None:
    first, second = worker_threads.submit(message(log, "a", 3)), worker_threads.submit(message(log, "b", 2))
    assert log.comes_to(["a0", "a1"], is_full=True)
    log.release("a0")
    assert log.comes_to(["a0", "a1", "a2"], is_full=True)
    assert not first.done
    log.release("a1")
    assert log.comes_to(["a0", "a1", "a2", "b0"], is_full=True)
    log.release("a2")
    assert first.wait(TIMEOUT)
    assert log.comes_to(["a0", "a1", "a2", "b0", "b1"])
    assert not second.done
    log.release("b0")
    log.release("b1")
    assert second.wait(TIMEOUT)
    assert list(first.finished_at) == ["a0", "a1", "a2"]


def test_a_message_larger_than_the_window_goes_alone(worker_threads: WorkerThreads, log: Log) -> None:
    tickets = [worker_threads.submit(message(log, name, 1, num_bytes=10 * MANY_BYTES)) for name in "ab"]
    assert log.comes_to(["a0"], is_full=True)
    log.release("a0")
    assert log.comes_to(["a0", "b0"])
    log.release("b0")
    assert all(ticket.wait(TIMEOUT) for ticket in tickets)


def test_what_needs_the_answer_waits_for_all_of_it(worker_threads: WorkerThreads, log: Log) -> None:
    seen = []

    def job() -> Job:
        yield log.post("question0", 1)
        yield log.post("question1", 1)
        yield None
        seen.append([work.released.is_set() for name, work in log.works if name.startswith("question")])
        yield log.post("answer", 1)
        seen.append([work.released.is_set() for name, work in log.works if name == "answer"])

    first, second = worker_threads.submit(job()), worker_threads.submit(message(log, "b", 1, num_bytes=1))
    assert log.comes_to(["question0", "question1", "b0"])
    log.release("b0")
    log.release("question0")
    assert not seen
    log.release("question1")
    assert log.comes_to(["question0", "question1", "b0", "answer"])
    assert not second.done  # in turn
    log.release("answer")
    assert first.wait(TIMEOUT)
    assert second.wait(TIMEOUT)
    assert first.awaited == "answer"
    assert seen == [[True, True], [True]]


def test_an_error_ends_its_talk_and_gives_the_way_free(worker_threads: WorkerThreads, log: Log) -> None:
    def job() -> Job:
        yield log.post("broken", MANY_BYTES, RuntimeError("connection closed"))
        yield log.post("half", MANY_BYTES)
        yield log.post("never", MANY_BYTES)

    first, second = worker_threads.submit(job()), worker_threads.submit(message(log, "b", 1))
    assert log.comes_to(["broken", "half"], is_full=True)
    log.release("broken")
    assert first.wait(TIMEOUT)
    assert str(first.error) == "connection closed"
    assert first.awaited == "broken"
    assert log.comes_to(["broken", "half", "b0"])
    log.release("b0")
    assert second.wait(TIMEOUT)
    assert second.error is None
    assert log.names == ["broken", "half", "b0"]


@pytest.mark.parametrize("when", ["ahead", "after the answer"])
def test_an_error_while_posting_is_the_tickets(worker_threads: WorkerThreads, log: Log, when: str) -> None:
    def job() -> Job:
        yield log.post("a", 1)
        if when == "after the answer":
            yield None
        raise OSError("no such peer")

    first, second = worker_threads.submit(job()), worker_threads.submit(message(log, "b", 1, num_bytes=1))
    assert log.comes_to(["a", "b0"])
    log.release("a")
    log.release("b0")
    assert first.wait(TIMEOUT)
    assert isinstance(first.error, OSError)
    assert second.wait(TIMEOUT)
    assert second.error is None


class OneClosedPair:
    """A communicator whose connection to rank 2 is closed for sending."""

    def recv(self, *_: Any) -> Held:
        held = Held()
        held.released.set()
        return held

    def send(self, message: Any, peer: int, tag: int) -> Held:
        if peer == 2:
            raise RuntimeError("the pair is closed")
        return self.recv(message, peer, tag)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_post_that_fails_names_its_peer(worker_threads: WorkerThreads, num_ahead: int) -> None:
    def job() -> Job:
        if not num_ahead:
            yield None  # then it is the thread that waits which posts
        message = torch.zeros(1)
        yield post_point_to_point(
            OneClosedPair(), [Message(2, message, 0)], [Message(1, message, 0), Message(2, message, 0)]
        )

    ticket = worker_threads.submit(job())
    assert ticket.wait(TIMEOUT)
    assert str(ticket.error) == "the pair is closed"
    assert ticket.awaited == "rank 2 to receive ours"
