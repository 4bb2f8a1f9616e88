"""Who is sent something now: what belongs to older exchanges goes first, both ways, and nobody holds others up."""

from typing import Any
from unittest import mock

import pytest
import torch
from elastic_ranks import make_model
from meshes import await_that, connected, message
from ranks import on_ranks

from gossip.communication.host.worker_threads import WINDOW_BYTES
from gossip.elastic.connections import send_queue
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Key, Kind, PeerConnection
from gossip.elastic.connections.send_queue import PATIENCE_S, UnderWay, whose_turn

LARGE = 2 * WINDOW_BYTES
QUIET = 2 * PATIENCE_S


def to(member: int, number: int, num_bytes: int = LARGE, quiet_s: float = 0.0) -> UnderWay:
    return UnderWay(number, member, num_bytes, True, quiet_s)


def of(member: int, number: int, num_bytes: int = LARGE, quiet_s: float = 0.0) -> UnderWay:
    return UnderWay(number, member, num_bytes, False, quiet_s)


TURNS: dict[str, tuple[list[UnderWay], list[int]]] = {
    "nothing": ([], []),
    "one": ([to(1, 0)], [1]),
    "the-older-one": ([to(2, 5), to(1, 4)], [1]),
    "all-of-the-older-ones": ([to(1, 4), to(1, 5), to(2, 6)], [1]),
    "small-ones-together": ([to(1, 4, 100), to(2, 6)], [1, 2]),
    "not-past-what-waits-behind-a-small-one": ([to(1, 4, 100), to(1, 5), to(2, 6)], [1]),
    "not-before-an-older-one-has-come": ([of(3, 4), to(2, 6)], []),
    "unless-it-is-small": ([of(3, 4, 100), to(2, 6)], [2]),
    "what-comes-later-is-not-awaited": ([of(3, 8), to(2, 6)], [2]),
    "nor-who-takes-nothing": ([to(1, 4, quiet_s=QUIET), to(2, 6)], [1, 2]),
    "nor-who-sends-nothing": ([of(3, 4, quiet_s=QUIET), to(2, 6)], [2]),
}


@pytest.mark.parametrize(("messages", "members"), TURNS.values(), ids=TURNS)
def test_older_exchanges_go_first(messages: list[UnderWay], members: list[int]) -> None:
    assert whose_turn(messages) == whose_turn(messages[::-1]) == members


@pytest.mark.parametrize("is_expected_before", [True, False])
def test_what_a_peer_is_ready_to_send_goes_before_what_is_sent_after_it(
    is_expected_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_queue, "PATIENCE_S", 60.0)  # signs of life may be late on a busy machine
    values = torch.ones(LARGE, dtype=torch.uint8)
    key, later = message(0), message(1)
    with connected(3) as (mesh, sender, receiver):
        turns: list[list[PeerConnection]] = []
        its_turns = mesh._that_send

        def recorded() -> list[PeerConnection]:
            turns.append(its_turns())
            return turns[-1]

        monkeypatch.setattr(mesh, "_that_send", recorded)
        monkeypatch.setattr(sender, "_that_send", list)  # it waits for its turn
        sender.send(0, key, values)
        await_that(mesh, lambda: mesh._connections[1].is_sending)
        if is_expected_before:
            mesh.expect(1, key, LARGE)
        frame = mesh.send(2, later, values)
        if not is_expected_before:
            mesh.expect(1, key, LARGE)
            await_that(mesh, lambda: frame.has_ended)
        first_turn = len(turns) + 1  # that one may have begun before
        await_that(mesh, lambda: len(turns) > first_turn + 2)
        assert not any(turns[first_turn:])
        assert frame.has_begun != is_expected_before
        monkeypatch.undo()
        await_that(mesh, lambda: mesh.has(1, key))
        await_that(receiver, lambda: receiver.has(0, later))


@on_ranks(2, anew=True)
def test_all_turns_of_an_exchange_are_sent_with_the_number_of_the_first() -> None:
    """Those of compressed exchanges would wait behind the next buckets' openings, and the next step for them."""
    sent: dict[tuple[int, int], set[int]] = {}
    turns: set[int] = set()
    send = Mesh.send

    def note(self: Mesh, member: int, key: Key, payload: torch.Tensor | None = None, number: int | None = None) -> Any:
        frame = send(self, member, key, payload, number)
        if key.kind == Kind.MESSAGE:
            sent.setdefault((key.first, key.second), set()).add(frame.number)
            turns.add(key.third)
        return frame

    with mock.patch.object(Mesh, "send", note):
        model = make_model(4, {"topology": "ring", "compression": "int8"})
        for _ in range(3):
            model(torch.ones(2, 4, dtype=torch.float64)).backward()
        model.close()
    assert turns > {0}
    numbers = [number for numbers in sent.values() for number in numbers]
    assert len(sent) == len(numbers) == len(set(numbers)) >= 3
