"""Random, truncated and mutated frames: each can end the connection over which it comes, and nothing else."""

import contextlib
import functools
import random
import select
import socket
import struct
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import unsupervised
from elastic_ranks import make_model, make_steps, targets
from meshes import SECRET, TIMEOUT, await_that
from tiers import rest_is_slow

from gossip import ExchangeError
from gossip.algorithms.asynchronous import Asynchronous
from gossip.elastic import elastic_world
from gossip.elastic.connections import peer_connection
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import (
    ConnectionLost,
    Frame,
    Identity,
    Key,
    Kind,
    Outgoing,
    PeerConnection,
)
from gossip.elastic.connections.shared_payloads import SharedPayloads
from gossip.elastic.flag_votes import FlagVotes
from gossip.elastic.state_transfer import StateSource

NUM_FRAMES = 10_000
_NUMBERS = (0, 1, 2, 4, 2**31, 2**45, 2**62, 2**63, 2**64 - 1)
_LENGTH = struct.Struct("<Q")


def frame(key: Key, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    content = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
    return bytes(Outgoing(key, content)._left[0]) + payload


def connected(end: socket.socket, member: int, *, called: int | None = None) -> PeerConnection:
    """One whose frames carry no authentication codes after the greeting."""
    own = Identity(SECRET, member, authenticates_all=False)
    return PeerConnection(end, TIMEOUT, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), own, called)


def hostile(seed: int) -> Iterator[bytes]:
    """Yield frames whose bytes are random, cut off, changed, or of which only the key and the payload are random."""
    numbers = random.Random(seed)
    header = peer_connection._HEADER.size
    for count in range(NUM_FRAMES):
        kind = numbers.choice(list(Kind))
        key = Key(kind, *(numbers.choice(_NUMBERS) for _ in range(3)))
        valid = frame(key, numbers.randbytes(numbers.choice((0, 1, 7, 8, 24, 40, 41, 200))))
        if count % 4 == 0:
            yield numbers.randbytes(numbers.randrange(1, 200))
        elif count % 4 == 1:
            yield valid[: numbers.randrange(1, len(valid) + 1)]
        elif count % 4 == 2:
            changed = bytearray(valid)
            changed[numbers.randrange(len(changed))] ^= 1 << numbers.randrange(8)
            if numbers.random() < 0.3:
                changed[header - _LENGTH.size : header] = _LENGTH.pack(numbers.choice(_NUMBERS))
            yield bytes(changed)
        else:
            yield valid


class Arriving:
    """A socket on which bytes arrive in pieces, and then nothing more."""

    def __init__(self, content: bytes, numbers: random.Random) -> None:
        self._content, self._numbers = content, numbers

    def setblocking(self, _: bool) -> None: ...

    def setsockopt(self, *_: int) -> None: ...

    def sendmsg(self, parts: list[memoryview]) -> int:
        return sum(map(len, parts))

    def recvmsg_into(self, targets: list[memoryview]) -> tuple[int]:
        if not self._content:
            raise BlockingIOError
        size = min(len(targets[0]), self._numbers.randrange(1, 64))
        piece, self._content = self._content[:size], self._content[size:]
        targets[0][: len(piece)] = piece
        return (len(piece),)


@pytest.mark.parametrize("is_member", [False, True], ids=["a stranger", "a member"])
def test_what_is_no_frame_ends_the_connection_and_nothing_else(is_member: bool) -> None:
    numbers = random.Random(0)
    outcomes = {"lost": 0, "frames": 0, "waits": 0}
    for content in hostile(seed=1):
        arriving = cast(socket.socket, Arriving(content, numbers))
        connection = connected(arriving, 0)
        connection.is_proved = is_member
        taken: list[Frame] = []
        try:
            for _ in range(len(content) // 16 + 1):
                connection.receive(taken.append)
        except ConnectionLost:
            outcomes["lost"] += 1
        else:
            outcomes["frames" if taken else "waits"] += 1
    assert min(outcomes["lost"], outcomes["waits"]) > NUM_FRAMES / 20, outcomes
    assert outcomes["frames"] > NUM_FRAMES / 20 if is_member else outcomes["frames"] == 0, outcomes


@pytest.mark.parametrize("nbytes", [2**45, 2**63, 2**64 - 1])
def test_a_length_beyond_all_memory_is_named(nbytes: int) -> None:
    header = bytearray(frame(Key(Kind.MESSAGE)))
    header[-_LENGTH.size :] = _LENGTH.pack(nbytes)
    arriving = cast(socket.socket, Arriving(bytes(header), random.Random(0)))
    connection = connected(arriving, 0)
    connection.is_proved = True
    with pytest.raises(ConnectionLost, match=f"a frame of {nbytes} bytes was announced"):
        connection.receive(lambda _: None)


@pytest.mark.slow
def test_members_who_send_them_are_lost_and_the_others_are_served() -> None:
    """Everything that handles frames in the mesh's thread gets them, from members who know the secret."""
    mesh, other = (Mesh(Identity(SECRET, member, authenticates_all=False), "127.0.0.1", TIMEOUT) for member in range(2))
    questions: list[Any] = []
    try:
        parts = [StateSource(mesh), SharedPayloads(mesh, cast(Any, None)), FlagVotes(mesh)]
        for kind in (Kind.ALARM, Kind.PAIR, Kind.AVERAGE):
            mesh.handlers[kind] = lambda member, came: questions.append((member, came))
        other.connect({0: mesh.address})
        for member, content in enumerate(hostile(seed=2), start=2):
            with socket.create_connection(mesh.address) as hostile_end:
                connection = connected(hostile_end, member, called=0)
                while not connection.is_proved:
                    select.select([hostile_end], [], [], 20)
                    connection.receive(lambda _: None)
                hostile_end.setblocking(True)
                hostile_end.sendall(content)
        await_that(mesh, lambda: len(mesh.lost) == NUM_FRAMES or mesh.failure)
        mesh.check()
        assert 1 not in mesh.lost
        reasons = {reason.partition(":")[0] for reason in mesh.lost.values()}
        assert {
            "the connection was closed",
            "a frame of kind LENT that arrived cannot be read",
            "a frame of kind MEMORY that arrived cannot be read",
            "data that arrived over the connection are not a frame of this program",
        } <= reasons
        other.send(0, Key(Kind.MESSAGE, 7))
        await_that(mesh, lambda: mesh.has(1, Key(Kind.MESSAGE, 7)))
        del parts
    finally:
        other.close()
        mesh.close()


def train_beside_one_that_sends_too_little(options: dict[str, Any], *, averages: bool) -> str:
    """Whom the rank that goes on has lost, and why; ``averages``: of what all ranks do together, too little is sent."""
    rank = dist.get_rank()
    send = Mesh.send

    def send_less(self: Mesh, member: int, key: Key, payload: Any = None, *more: Any) -> Outgoing:
        is_message = key.kind in (Kind.MESSAGE, Kind.PAIR) and payload is not None
        if averages:
            is_message = key.kind == Kind.COLLECTIVE and payload is not None and payload.dtype == torch.float64
        return send(self, member, key, payload.view(-1)[:-1].clone() if is_message else payload, *more)

    with (
        mock.patch.object(elastic_world, "can_share", return_value=False),
        make_model(4, {"topology": "complete", "min_ranks": 1, **options}) as model,
    ):
        if rank == 1:
            mock.patch.object(Mesh, "send", send_less).start()
        with contextlib.suppress(ExchangeError):  # the rank that sends too little is told that it was dropped
            while not model.world.mesh.lost:  # type: ignore[attr-defined]
                model(targets(rank, 4)).backward()
                if averages:
                    model.global_avg()
            if rank == 0:
                make_steps(model, 3)
        mock.patch.stopall()
        return str(model.world.mesh.lost)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "averages", "text"),
    rest_is_slow(
        [
            ({"soft_deadline": 1e-3}, False, "has 24 bytes, and must have 32"),
            ({}, True, "has 8 bytes, and must have 16"),
            ({}, False, "has 24 bytes, and must have 32"),
            ({"algorithm": Asynchronous(max_staleness=1)}, False, "has 24 bytes, and must have 32"),
        ],
        2,
    ),
)
def test_a_message_of_the_wrong_size_ends_the_connection_and_not_the_rank(
    options: dict[str, Any], averages: bool, text: str
) -> None:
    function = functools.partial(train_beside_one_that_sends_too_little, options, averages=averages)
    lost, _ = unsupervised.results_of(function, world_size=2)
    assert text in lost
