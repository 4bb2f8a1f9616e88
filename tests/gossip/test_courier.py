"""What is posted ahead, what has to wait for its turn, and what becomes of errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from gossip.communication import courier as module
from gossip.communication.courier import Courier, Operation, Talk

MANY_BYTES = module._WINDOW_BYTES // 2
TIMEOUT = timedelta(seconds=30)
QUIET_S = 0.1


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
    """What talks have posted, in order."""

    def __init__(self) -> None:
        self.works: list[tuple[str, Held]] = []

    def post(self, name: str, num_bytes: int, error: Exception | None = None) -> tuple[Operation]:
        work: Any = Held(error)
        self.works.append((name, work))
        return (Operation(name, work, num_bytes),)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.works]

    def settles_at(self, names: list[str]) -> bool:
        """Whether these are posted, and no others soon after."""
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while self.names != names and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(QUIET_S)
        return self.names == names

    def release(self, name: str) -> None:
        self.works[self.names.index(name)][1].released.set()


@pytest.fixture
def courier() -> Iterator[Courier]:
    each = Courier("test")
    yield each
    assert each.close(TIMEOUT)


def message(log: Log, name: str, num_pieces: int, num_bytes: int = MANY_BYTES) -> Talk:
    for piece in range(num_pieces):
        yield log.post(f"{name}{piece}", num_bytes)


def test_pieces_follow_each_other_and_so_do_messages(courier: Courier) -> None:
    log = Log()
    first, second = courier.submit(message(log, "a", 3)), courier.submit(message(log, "b", 2))
    assert log.settles_at(["a0", "a1"])
    log.release("a0")
    assert log.settles_at(["a0", "a1", "a2"])
    assert not first.done
    log.release("a1")
    assert log.settles_at(["a0", "a1", "a2", "b0"])
    log.release("a2")
    assert first.wait(TIMEOUT)
    assert log.settles_at(["a0", "a1", "a2", "b0", "b1"])
    assert not second.done
    log.release("b0")
    log.release("b1")
    assert second.wait(TIMEOUT)
    assert list(first.finished_at) == ["a0", "a1", "a2"]


def test_small_messages_are_all_posted_at_once(courier: Courier) -> None:
    log = Log()
    names = [f"{name}0" for name in "abcdefgh"]
    tickets = [courier.submit(message(log, name, 1, num_bytes=100)) for name in "abcdefgh"]
    assert log.settles_at(names)
    for name in names:
        log.release(name)
    assert all(ticket.wait(TIMEOUT) for ticket in tickets)


def test_a_message_larger_than_the_window_goes_alone(courier: Courier) -> None:
    log = Log()
    tickets = [courier.submit(message(log, name, 1, num_bytes=10 * MANY_BYTES)) for name in "ab"]
    assert log.settles_at(["a0"])
    log.release("a0")
    assert log.settles_at(["a0", "b0"])
    log.release("b0")
    assert all(ticket.wait(TIMEOUT) for ticket in tickets)


def test_what_needs_the_answer_waits_for_all_of_it(courier: Courier) -> None:
    log, seen = Log(), []

    def talk() -> Talk:
        yield log.post("question0", 1)
        yield log.post("question1", 1)
        yield None
        seen.append([work.released.is_set() for _, work in log.works])
        yield log.post("answer", 1)
        seen.append([work.released.is_set() for _, work in log.works])

    first, second = courier.submit(talk()), courier.submit(message(log, "b", 1, num_bytes=1))
    assert log.settles_at(["question0", "question1", "b0"])
    log.release("b0")
    log.release("question0")
    assert log.settles_at(["question0", "question1", "b0"])
    log.release("question1")
    assert log.settles_at(["question0", "question1", "b0", "answer"])
    assert first.awaited == "answer"
    assert not second.done  # in turn
    log.release("answer")
    assert second.wait(TIMEOUT)
    assert seen == [[True, True, True], [True, True, True, True]]


def test_an_error_ends_its_talk_and_gives_the_way_free(courier: Courier) -> None:
    log = Log()

    def talk() -> Talk:
        yield log.post("broken", MANY_BYTES, RuntimeError("connection closed"))
        yield log.post("half", MANY_BYTES)
        yield log.post("never", MANY_BYTES)

    first, second = courier.submit(talk()), courier.submit(message(log, "b", 1))
    assert log.settles_at(["broken", "half"])
    log.release("broken")
    assert first.wait(TIMEOUT)
    assert str(first.error) == "connection closed"
    assert first.awaited == "broken"
    assert log.settles_at(["broken", "half", "b0"])
    log.release("b0")
    assert second.wait(TIMEOUT)
    assert second.error is None


@pytest.mark.parametrize("when", ["ahead", "after the answer"])
def test_an_error_while_posting_is_the_tickets(courier: Courier, when: str) -> None:
    log = Log()

    def talk() -> Talk:
        yield log.post("a", 1)
        if when == "after the answer":
            yield None
        raise OSError("no such peer")

    first, second = courier.submit(talk()), courier.submit(message(log, "b", 1, num_bytes=1))
    assert log.settles_at(["a", "b0"])
    log.release("a")
    log.release("b0")
    assert first.wait(TIMEOUT)
    assert isinstance(first.error, OSError)
    assert second.wait(TIMEOUT)
    assert second.error is None
