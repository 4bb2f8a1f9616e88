"""Somebody between two members who alters, repeats, moves or invents frames: the connection ends."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from meshes import SECRET, TIMEOUT, await_frame, await_loss, connect, meshes, message

from gossip.elastic.connections.frame_authentication import Authenticator, make_authenticators, network_number, tag
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Identity, PeerConnection

HEADER_BYTES, TAG_BYTES = 37, 16
PAYLOAD = torch.arange(3 * 2**17, dtype=torch.int64).view(torch.uint8)  # hashed in several parts
ALTERED = "a frame arrived that is not what was sent"

Change = Callable[[list[bytes]], list[bytes]]
"""What is passed on in place of three messages, of which the middle one is large."""


def same(frames: list[bytes]) -> list[bytes]:
    return frames


def bit_of(place: int, number: int = 1) -> Change:
    def change(frames: list[bytes]) -> list[bytes]:
        altered = bytearray(frames[number])
        altered[place] ^= 1
        return [*frames[:number], bytes(altered), *frames[number + 1 :]]

    return change


def other_payload(frames: list[bytes]) -> list[bytes]:
    start = HEADER_BYTES + TAG_BYTES
    return [frames[0][:start] + frames[2][start:], *frames[1:]]


def invented(frames: list[bytes]) -> list[bytes]:
    mac = Authenticator(b"a key of his own").next(frames[0][:HEADER_BYTES])
    head = frames[0][:HEADER_BYTES] + tag(mac)
    mac.update(b"x" * 8)
    return [head + b"x" * 8 + tag(mac), *frames[1:]]


def taken(connection: socket.socket, num_bytes: int) -> bytes:
    content = connection.recv(num_bytes, socket.MSG_WAITALL)
    if len(content) < num_bytes:
        raise EOFError
    return content


def frame_from(connection: socket.socket, tag_bytes: int = TAG_BYTES) -> bytes:
    header = taken(connection, HEADER_BYTES)
    nbytes = int.from_bytes(header[-8:], "little")
    return header + taken(connection, tag_bytes + nbytes + (tag_bytes if nbytes else 0))


class Relay:
    """Passes on what one member calls another one for; from :attr:`changes` on, with a change to every three frames."""

    def __init__(self, target: tuple[str, int], change: Change, *, goes_back: bool = False) -> None:
        self._target, self._change, self._goes_back = target, change, goes_back
        self.changes = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        with contextlib.suppress(OSError, EOFError), contextlib.ExitStack() as stack:
            caller = stack.enter_context(self._listener.accept()[0])
            called = stack.enter_context(socket.create_connection(self._target))
            back = threading.Thread(target=self._carry_back, args=(called, caller))
            stack.callback(back.join)
            stack.callback(called.shutdown, socket.SHUT_RDWR)
            back.start()
            called.sendall(frame_from(caller, tag_bytes=0))
            while True:
                frames = [frame_from(caller)]
                if self.changes.is_set():
                    frames = self._change([*frames, frame_from(caller), frame_from(caller)])
                (caller if self._goes_back and self.changes.is_set() else called).sendall(b"".join(frames))

    def _carry_back(self, called: socket.socket, caller: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.callback(caller.shutdown, socket.SHUT_RDWR)
            while content := called.recv(2**16):
                caller.sendall(content)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@contextlib.contextmanager
def relayed(change: Change, *, goes_back: bool = False) -> Iterator[list[Mesh]]:
    """Three members; the second one calls the first one through a relay."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(meshes(3))
        relay = Relay(made[0].address, change, goes_back=goes_back)
        stack.callback(relay.close)
        connect(made, {1: {0: relay.address}})
        relay.changes.set()
        yield made
        made[1].close()  # before the relay


@pytest.fixture(autouse=True)
def only_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerConnection, "_send_first", lambda _self, _kind: False)


CHANGES: dict[str, tuple[Change, int]] = {
    "nothing": (same, 3),
    "the kind": (bit_of(4), 1),
    "the step": (bit_of(5), 1),
    "the length": (bit_of(29), 1),
    "an absurd length": (bit_of(36), 1),
    "the header's code": (bit_of(HEADER_BYTES), 1),
    "the payload's beginning": (bit_of(HEADER_BYTES + TAG_BYTES), 1),
    "the payload's end": (bit_of(HEADER_BYTES + TAG_BYTES + PAYLOAD.nbytes - 1), 1),
    "the payload's code": (bit_of(-1), 1),
    "a small payload's code": (bit_of(-1, number=2), 2),
    "the payload of another frame": (other_payload, 0),
    "an invented frame": (invented, 0),
    "a frame twice": (lambda frames: [frames[0], *frames], 1),
    "a frame again later": (lambda frames: [*frames, frames[0]], 3),
    "two frames in another order": (lambda frames: [frames[0], frames[2], frames[1]], 1),
    "one left out": (lambda frames: frames[1:], 0),
    "one cut short": (lambda frames: [*frames[:1], frames[1][: -2 * TAG_BYTES], frames[2]], 1),
}
"""What is changed, and how many of the messages arrive all the same."""


@pytest.mark.parametrize(("change", "num_arriving"), CHANGES.values(), ids=CHANGES)
def test_what_was_not_sent_ends_the_connection(change: Change, num_arriving: int) -> None:
    with relayed(change) as (first, second, third):
        payloads = [torch.ones(8, dtype=torch.uint8), PAYLOAD, torch.zeros(8, dtype=torch.uint8)]
        keys = [message(step) for step in range(3)]
        for key, payload in zip(keys, payloads, strict=True):
            second.send(0, key, payload)
        for key, payload in zip(keys[:num_arriving], payloads, strict=False):
            assert torch.equal(await_frame(first, 1, key), payload)
        if change is same:
            return
        assert await_loss(first, 1).startswith(ALTERED)
        assert not any(first.has(1, key) for key in keys)
        await_loss(second, 0)
        third.send(0, keys[0], PAYLOAD)
        assert torch.equal(await_frame(first, 2, keys[0]), PAYLOAD), "the others go on"


def test_a_frame_that_comes_back_to_its_sender_ends_the_connection() -> None:
    with relayed(same, goes_back=True) as (_, second, _):
        for step in range(3):
            second.send(0, message(step), torch.ones(8))
        assert await_loss(second, 0).startswith(ALTERED)


def test_only_processes_of_one_machine_have_the_same_number() -> None:
    here = ("10.0.0.1", ["a boot", 4026531840])
    others = [("10.0.0.2", here[1]), (here[0], ["another", here[1][1]]), (here[0], ["a boot", 1]), (here[0], [])]
    assert len({network_number(*here), *(network_number(*other) for other in others)}) == 1 + len(others)
    assert network_number(*others[-1]) == 0


def test_two_machines_cannot_be_made_to_believe_that_they_are_one() -> None:
    """Between processes of one machine frames carry no codes; who changes what the greetings say of that is noticed."""
    caller, called = (0, 5, b"a" * 16), (1, 6, b"b" * 16)
    sends, _ = make_authenticators(SECRET, caller, (1, 5, called[2]), is_caller=True, authenticates_all=True)
    _, receives = make_authenticators(SECRET, called, (0, 6, caller[2]), is_caller=False, authenticates_all=True)
    assert tag(sends.next(b"")) != tag(receives.next(b""))


@pytest.mark.parametrize(
    ("secret", "authenticate", "reason"),
    [
        (b"another", True, "it does not know the secret of this training"),
        (SECRET, False, "authenticate must be equal on all ranks, got "),
    ],
)
def test_whoever_does_not_prove_that_it_knows_the_secret_is_not_connected(
    secret: bytes, authenticate: bool, reason: str
) -> None:
    stranger = Mesh(Identity(secret, 1, authenticate), "127.0.0.1", TIMEOUT)
    with meshes(1) as (first,), contextlib.closing(stranger):
        stranger.call({0: first.address})
        assert await_loss(stranger, 0).startswith((reason, "the connection was closed", "Connection reset"))
        assert not first.has_met(1)


def test_a_member_in_place_of_another_one_is_not_connected() -> None:
    with meshes(2) as (first, second):
        first.call({7: second.address})
        assert await_loss(first, 7) == "rank 1 replied in its place"
