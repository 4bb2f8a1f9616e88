"""Frames over one connection: whole, in order, and signs of life between them."""

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from gossip.elastic.connections.peer_connection import Frame, Identity, Key, Kind, Outgoing, PeerConnection, next_number

SECRET = b"s" * 32
TIMEOUT = timedelta(seconds=10)
SMALL = torch.arange(4, dtype=torch.float32)
LARGE = torch.arange(2**21, dtype=torch.float32)  # 8 MiB: more than the kernel takes at once


CODES = {
    "every frame": (True, (5, 6)),
    "every frame of unknown machines": (True, (0, 0)),
    "only the greeting": (False, (5, 6)),
    "of one machine": (True, (5, 5)),
}


@pytest.fixture(params=CODES.values(), ids=list(CODES))
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[PeerConnection, PeerConnection]]:
    authenticates_all, networks = request.param
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        caller = stack.enter_context(socket.create_connection(listener.getsockname()))
        answering = stack.enter_context(listener.accept()[0])
        both = [
            PeerConnection(end, TIMEOUT, empty, Identity(SECRET, member, authenticates_all, networks[member]), called)
            for end, member, called in ((caller, 0, 1), (answering, 1, None))
        ]
        greetings: list[Frame] = []
        while len(greetings) < 2:
            for end in both:
                end.receive(greetings.append)
        assert kinds(greetings) == [Kind.HELLO] * 2
        assert [end.member for end in both] == [1, 0]
        yield both[0], both[1]


def empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def carried(sender: PeerConnection, receiver: PeerConnection, num_frames: int) -> list[Frame]:
    found: list[Frame] = []
    while len(found) < num_frames:
        sender.send()
        receiver.receive(found.append)
    return found


def kinds(frames: list[Frame]) -> list[Kind]:
    return [frame.key.kind for frame in frames]


def test_which_frames_carry_codes(ends: tuple[PeerConnection, ...], request: pytest.FixtureRequest) -> None:
    ends[0].enqueue(Outgoing(Key(Kind.MESSAGE), SMALL))
    num_codes = 2 * ("every frame" in request.node.name)
    assert len(ends[1].socket.recv(1000)) == 37 + SMALL.nbytes + 16 * num_codes


def test_small_frames_go_at_once_and_large_ones_wait_for_their_turn(ends: tuple[PeerConnection, ...]) -> None:
    sender, receiver = ends
    assert not sender.enqueue(Outgoing(Key(Kind.ALARM, 3)))
    large = Outgoing(Key(Kind.MESSAGE, 1), LARGE)
    assert sender.enqueue(large)
    assert sender.enqueue(Outgoing(Key(Kind.ALARM, 4))), "it must not overtake the large one"
    assert not large.has_begun
    frames = carried(sender, receiver, 3)
    assert [frame.key.first for frame in frames] == [3, 1, 4]
    assert torch.equal(frames[1].payload.view(torch.float32), LARGE)


def test_what_follows_up_an_older_exchange_goes_before_newer_ones(ends: tuple[PeerConnection, ...]) -> None:
    sender, receiver = ends
    numbers = [next_number() for _ in range(3)]
    first, second = (Outgoing(Key(Kind.MESSAGE, number), LARGE, number) for number in numbers[1:])
    sender.enqueue(first)
    sender.enqueue(second)
    assert not sender.enqueue(Outgoing(Key(Kind.MESSAGE, 8), SMALL, numbers[0])), "nothing has begun: it goes at once"
    assert not sender.send(), "the kernel does not take all of the first"
    assert sender.enqueue(Outgoing(Key(Kind.MESSAGE, 9), SMALL, numbers[0])), "it must not go into a frame"
    assert sender.enqueue(Outgoing(Key(Kind.MESSAGE, 10), SMALL, numbers[1]))
    frames = carried(sender, receiver, 5)
    assert [frame.key.first for frame in frames] == [8, numbers[1], 9, 10, numbers[2]]
    assert torch.equal(frames[1].payload.view(torch.float32), LARGE)


@pytest.mark.parametrize("wanted", [[Kind.BEAT, Kind.MESSAGE], [Kind.MESSAGE]], ids=["waits", "has begun"])
def test_a_sign_of_life_goes_before_what_waits_and_not_into_a_frame(
    ends: tuple[PeerConnection, ...], wanted: list[Kind]
) -> None:
    sender, receiver = ends
    sender.enqueue(Outgoing(Key(Kind.MESSAGE, 1), LARGE))
    if len(wanted) == 1:
        assert not sender.send(), "the kernel does not take all of it"
    sender.beat(Key(Kind.BEAT))
    frames = carried(sender, receiver, len(wanted))
    assert kinds(frames) == wanted
    assert torch.equal(frames[-1].payload.view(torch.float32), LARGE)
    sender.beat(Key(Kind.BEAT))
    assert kinds(carried(sender, receiver, 1)) == [Kind.BEAT]


def test_a_message_that_waits_for_its_turn_is_announced(ends: tuple[PeerConnection, ...]) -> None:
    sender, receiver = ends
    sender.enqueue(Outgoing(Key(Kind.MESSAGE, 1), LARGE))
    assert [num_bytes for _, num_bytes in sender.unsent()] == [LARGE.nbytes + 37]
    frames: list[Frame] = []
    while not receiver.is_sending:
        receiver.receive(frames.append)
    assert not frames, "the announcement is no frame for others"
    frames += carried(sender, receiver, 1)
    assert not receiver.is_sending
    assert not sender.unsent()
    assert torch.equal(frames[0].payload.view(torch.float32), LARGE)


def test_a_frame_goes_on_from_a_copy(ends: tuple[PeerConnection, ...]) -> None:
    sender, receiver = ends
    values = LARGE.clone()
    frame = Outgoing(Key(Kind.MESSAGE, 1), values)
    sender.enqueue(frame)
    assert not sender.send()
    frame.copy()
    values.zero_()
    (received,) = carried(sender, receiver, 1)
    assert torch.equal(received.payload.view(torch.float32), LARGE)
