"""A process's end is seen from outside, through a socket that nobody answers; its being frozen or busy is not."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from gossip.communication.liveness import peer_liveness
from gossip.communication.liveness.process_liveness import Process

PATIENCE_S = 20
PROGRAM = """
import os, signal, socket
import torch.distributed as dist
from gossip.communication.liveness import peer_liveness
peer_liveness.own_address = lambda _: (socket.AF_INET, "127.0.0.1")
address = peer_liveness.listen(None)
assert peer_liveness.listen(None) == address
child = os.fork()
if child == 0:
    signal.pause()
print(address[1], child, flush=True)
signal.pause()
"""


@pytest.fixture
def process() -> Iterator[Process]:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as started:
        port, child = map(int, started.stdout.readline().split())
        try:
            yield Process("", started.pid, 0, "127.0.0.1", port)
        finally:
            started.kill()
            os.kill(child, signal.SIGKILL)


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Process, socket.socket]]:
    made: dict[Process, socket.socket] = {}
    monkeypatch.setattr(peer_liveness, "_connections", made)
    yield made
    for each in made.values():
        each.close()


def has_gone(process: Process) -> bool:
    """Once its kernel has said something on the connection."""
    select.select([peer_liveness._connections[process]], [], [], PATIENCE_S)
    return peer_liveness.is_gone(process)


def test_end_of_a_process_is_seen_though_a_forked_child_lives_on(process: Process) -> None:
    early, late = process, process._replace(started_at=1)
    peer_liveness.connect([early])
    assert not peer_liveness.is_gone(early)
    os.kill(process.pid, signal.SIGSTOP)
    peer_liveness.connect([early, late])
    assert not peer_liveness.is_gone(early)
    assert not peer_liveness.is_gone(late)
    os.kill(process.pid, signal.SIGKILL)
    assert has_gone(early)
    assert has_gone(late)


def test_nothing_is_known_of_a_process_that_was_not_connected_to(connections: dict[Process, socket.socket]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refusing = Process("", 1, 0, "127.0.0.1", unused.getsockname()[1])
        nowhere = Process("", 2, 0, "192.0.2.1", 9)  # RFC 5737: nobody has it
        without = Process("", 3, 0)
        peer_liveness.connect([refusing, nowhere, without])
        assert not any(map(peer_liveness.is_gone, (refusing, nowhere, without)))
        assert list(map(peer_liveness.has_refused, (refusing, without))) == [True, False]
    assert not connections


def test_ranks_of_one_machine_listen_nowhere() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=listener.detach())
    for each in (None, dist.HashStore(), store, dist.PrefixStore("a", dist.PrefixStore("b", store))):
        assert peer_liveness.listen(each) == ("", 0)
