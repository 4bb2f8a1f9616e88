"""Frames between members of one process: in order, whole or not at all, and nobody waits for a stranger."""

import socket
from datetime import timedelta

import pytest
import torch
from meshes import SECRET, TIMEOUT, await_frame, await_loss, await_that, connected, message

from gossip import ExchangeError
from gossip.elastic.connections import mesh as module
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Identity
from gossip.elastic.connections.selector import READ


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
