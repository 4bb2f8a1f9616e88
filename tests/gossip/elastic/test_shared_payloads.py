"""Messages in memory that ranks of one machine share: read where they lie, and never written while somebody reads."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from meshes import TIMEOUT, await_frame, await_that, meshes

from gossip.communication.liveness.process_liveness import GONE
from gossip.communication.shared_buffers import BUFFERS_PER_ROW
from gossip.elastic.connections import shared_payloads
from gossip.elastic.connections.peer_connection import Frame, Key, Kind
from gossip.elastic.connections.shared_payloads import SharedPayloads

KEY = Key(Kind.MESSAGE, 7, 2, 1)
LIKE = torch.empty(1000)


class Pair:
    """Two ends: rank 0 sends, rank 1 reads."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.meshes = stack.enter_context(meshes(2))
        self.awaited: list[Sequence[int]] = []
        self.sender, self.reader = (SharedPayloads(mesh, self.wait) for mesh in self.meshes)
        self.is_introduced = threading.Event()
        on_reader = self.meshes[0].handlers[Kind.READER]

        def note(member: int, frame: Frame) -> None:
            on_reader(member, frame)
            self.is_introduced.set()

        self.meshes[0].handlers[Kind.READER] = note
        self.meshes[1].call({0: self.meshes[0].address})

    def wait(
        self, look: Callable[[], bool], awaited: Callable[[], Sequence[int]], where: str, *, looks_every_s: float
    ) -> None:
        del look, where, looks_every_s
        self.awaited.append(awaited())
        raise TimeoutError

    def await_introduction(self) -> None:
        assert self.is_introduced.wait(TIMEOUT.total_seconds())
        assert self.sender.reaches(1)

    def send(self, value: float) -> torch.Tensor:
        """What was sent, in the sender's memory."""
        message = self.sender.take("bucket", LIKE, "step 7").fill_(value)
        self.sender.send(1, KEY, message)
        return message

    def receive(self) -> torch.Tensor:
        return await_frame(self.meshes[1], 0, KEY)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        pair.await_introduction()
        yield pair


def test_a_message_is_read_where_it_lies(pair: Pair) -> None:
    message = pair.send(3.0)
    received = pair.receive()
    assert torch.equal(received.view(torch.float32), message)
    message.fill_(4.0)
    assert received.view(torch.float32).eq(4.0).all(), "it is the same memory"
    assert pair.reader.is_lent(received)


def test_memory_is_taken_again_when_it_has_been_read(pair: Pair) -> None:
    for _ in range(3 * BUFFERS_PER_ROW):
        pair.send(1.0)
        pair.meshes[1].give_back([pair.receive()])
    assert not pair.awaited


def test_a_rank_that_is_far_ahead_waits_for_whoever_reads(pair: Pair) -> None:
    for _ in range(BUFFERS_PER_ROW):
        pair.send(1.0)
    with pytest.raises(TimeoutError):
        pair.send(1.0)
    assert pair.awaited == [[1]]


def test_what_a_lost_rank_may_still_read_is_not_written_again(pair: Pair) -> None:
    sent = [pair.send(float(number)) for number in range(BUFFERS_PER_ROW)]
    pair.meshes[0].cut(1, "given up")
    for number in range(4 * BUFFERS_PER_ROW):
        pair.sender.take("bucket", LIKE, "step 8").fill_(-float(number) - 1)
    assert not pair.awaited
    for number, message in enumerate(sent):
        assert message.eq(float(number)).all()


def test_what_was_lent_to_a_process_that_has_ended_is_written_again(pair: Pair) -> None:
    sent = {pair.send(float(number)).data_ptr() for number in range(BUFFERS_PER_ROW)}
    pair.meshes[0].cut(1, "its process was killed")
    with mock.patch.object(shared_payloads, "state_of", return_value=GONE):
        assert pair.sender.take("bucket", LIKE, "step 8").data_ptr() in sent
    assert not pair.awaited


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_the_memory_of_a_lost_rank_goes_with_the_last_message_of_it(pair: Pair, is_asked_for: bool) -> None:
    first, second = ((pair.send(number), pair.receive())[1] for number in (1.0, 2.0))
    buffer = weakref.ref(pair.reader._lent[second.data_ptr()][1])
    pair.meshes[1].give_back([first])
    if not is_asked_for:
        pair.meshes[1].put(0, KEY, second, 0)
    pair.meshes[1].cut(0, "its process was killed")
    pair.reader.take("bucket", LIKE, "step 8")
    assert second.view(torch.float32).eq(2.0).all()
    if is_asked_for:
        pair.meshes[1].give_back([second])
    else:
        pair.meshes[1].forget(lambda *_: True)
    assert buffer() is None
    assert not pair.reader._lent
    assert not pair.reader._arenas


def test_ranks_on_other_machines_are_not_reached() -> None:
    with mock.patch.object(shared_payloads, "machine", side_effect=[["a"], ["b"]]), contextlib.ExitStack() as stack:
        pair = Pair(stack)
        await_that(pair.meshes[0], lambda: pair.meshes[0].has_met(1))
        sent = pair.meshes[0].send(1, KEY, torch.ones(4))  # comes after the introductions
        pair.receive()
        assert sent.has_ended
        assert not pair.sender.reaches(1)


def num_pages() -> int:
    """That this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_memory_holds_nothing_that_was_not_written(pair: Pair) -> None:
    """What is taken for a large message costs no memory until it is used."""
    before = num_pages()
    pair.sender.take("large", torch.empty(2**26), "step 0")
    pages = num_pages() - before
    assert pages * os.sysconf("SC_PAGE_SIZE") < 2**24
