"""Connections that do not say who they are are few and short; frames between members come whole and in order."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from meshes import SECRET, TIMEOUT, await_frame, await_loss, await_that, connected, meshes, message

from gossip import ExchangeError
from gossip.elastic.connections import listener as listeners
from gossip.elastic.connections import mesh as module
from gossip.elastic.connections.listener import Listener
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Identity, PeerConnection
from gossip.elastic.connections.selector import READ

MOST = listeners._MOST_UNKNOWN


@pytest.fixture
def listener() -> Iterator[Listener]:
    """One at which more connect than may be unknown at a time."""
    with contextlib.ExitStack() as stack:

        def connection(connected: socket.socket) -> PeerConnection:
            stack.callback(connected.close)
            return PeerConnection(connected, TIMEOUT, torch.empty, Identity(SECRET, 3))

        made = Listener(3, "127.0.0.1", connection)
        stack.callback(made.close)
        for _ in range(2 * MOST):
            stack.enter_context(socket.create_connection(made.socket.getsockname()))
        yield made


def test_those_that_say_nothing_have_a_deadline_and_those_that_wait_shorten_it(listener: Listener) -> None:
    first = listener.accept(100.0)
    assert len(first) == MOST
    assert not listener.is_open(100.0)
    assert listener.accept(100.0) == []
    assert listener.overdue(100.9) == []
    assert listener.overdue(101.1) == first, "others wait for their places"
    for known in first[1:]:
        listener.forget(known)
    assert len(listener.accept(102.0)) == MOST - 1
    for left in listener.overdue(104.0):
        listener.forget(left)
    assert len(listener.accept(105.0)) == 1
    assert listener.overdue(114.9) == []
    assert len(listener.overdue(115.1)) == 1, "there is room for others, but nobody may stay for good"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_descriptors_it_pauses_and_says_so_once(
    listener: Listener, warnings_told: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(_: int) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patches:
        patches.setattr(os, "dup", fail)
        for now in (10.0, 20.0):
            assert listener.accept(now) == []
            assert not listener.is_open(now + 0.4), "it would be woken at once, again and again"
            assert listener.is_open(now + 0.6)
    (warning,) = warnings_told
    assert "rank 3: nearly all of the" in warning
    assert "open files" in warning
    assert len(listener.accept(30.0)) == MOST


def test_it_leaves_descriptors_to_the_rest_of_the_process(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = os.dup(0)
    os.close(lowest)
    limit = lowest + 60
    monkeypatch.setattr(listeners, "_limit", lambda: limit)
    accepted = listener.accept(10.0)
    assert 0 < len(accepted) < MOST
    assert max(one.socket.fileno() for one in accepted) < limit - 8
    for one in accepted:
        listener.forget(one)
        one.close()
    assert len(listener.accept(11.0)) == len(accepted)


def test_an_error_of_its_own_is_raised(listener: Listener) -> None:
    listener.socket.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        listener.accept(10.0)


def test_strangers_are_hung_up_on_and_ranks_are_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_PATIENCE_S", 0.2)
    with meshes(2) as (mesh, other):
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(socket.create_connection(mesh.address, 60)) for _ in range(3 * MOST)]
            for stranger in opened:
                stranger.sendall(b"gsp1")
            other.connect({0: mesh.address})
            other.send(0, message(7))
            await_frame(mesh, 1, message(7))
            for stranger in opened:
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(64):  # the greeting; every one of them is hung up on
                        pass
        assert mesh.lost == {}
        mesh.check()


def test_who_does_not_read_is_sent_no_more_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BACKLOG_BYTES", 2**20)
    with connected(2) as (first, second):
        frames = [first.send(1, message(step), torch.full((2**20,), step, dtype=torch.uint8)) for step in range(64)]
        await_that(second, lambda: not second._connections[0].watched & READ)
        assert not frames[-1].has_ended
        for step in range(64):
            assert bool((await_frame(second, 0, message(step)) == step).all())
        await_that(first, lambda: frames[-1].has_ended)


def test_who_says_goodbye_has_left() -> None:
    with connected(2) as (first, second):
        first.send(1, message(0), torch.ones(2**20))
        first.leave(TIMEOUT)
        await_loss(second, 0)
        assert second.left == {0}
        assert await_frame(second, 0, message(0)).nbytes == 2**22


def test_who_does_not_come_is_named() -> None:
    mesh = Mesh(Identity(SECRET, 1), "127.0.0.1", timedelta(seconds=0.3))
    try:
        with pytest.raises(
            ExchangeError, match=r"^rank 1: connecting to all others: no connection with ranks 2, 3 within"
        ):
            mesh.connect({1: mesh.address, 2: ("127.0.0.1", 1), 3: ("127.0.0.1", 1)})
    finally:
        mesh.close()


def test_who_is_gone_before_it_is_called_is_lost() -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    address = gone.getsockname()[:2]
    gone.close()
    mesh = Mesh(Identity(SECRET, 1), "127.0.0.1", TIMEOUT)
    try:
        mesh.connect({0: address, 1: mesh.address})
        assert list(mesh.lost) == [0]
        assert "Connection refused" in mesh.lost[0]
    finally:
        mesh.close()
