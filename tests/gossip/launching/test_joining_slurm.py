"""Where the tasks of a step meet is their step's place, or an error in one line."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from free_ports import free_port

from gossip import LaunchError
from gossip.launching import joining
from gossip.launching.slurm import Step

TASK = Step(17, 2, 0, 0, 2, 0, 2, 0, 1, "localhost")
TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def other_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """The address of a store that is another program's."""
    monkeypatch.setattr(joining, "_STRANGER_PATIENCE_S", 0.1)
    monkeypatch.setattr(joining, "_stores", {})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    yield "127.0.0.1", store.port
    del store


def test_task_is_refused_by_the_store_of_another_program(other_store: tuple[str, int]) -> None:
    second = dataclasses.replace(TASK, task=1, local_task=1)
    with pytest.raises(LaunchError, match=r"is another program's key-value store, not that of step 17\.2; set MASTER_"):
        joining._store_of(second, other_store, TIMEOUT)


def test_first_task_refuses_a_port_that_is_taken(other_store: tuple[str, int]) -> None:
    with pytest.raises(LaunchError, match=rf"port {other_store[1]} on 127\.0\.0\.1, where step 17\.2 would keep its"):
        joining._store_of(TASK, other_store, TIMEOUT)


def test_store_of_a_step_on_one_node_is_for_that_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_stores", {})
    port = free_port()
    store = joining._store_of(TASK, ("127.0.0.1", port), TIMEOUT)
    second = joining._store_of(dataclasses.replace(TASK, task=1, local_task=1), ("127.0.0.1", port), TIMEOUT)
    assert second is store  # a process that joins again keeps it
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=5):  # noqa: PT011
        pass


def test_unknown_first_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(LaunchError, match=r"the address of no\.such\.host\.invalid, the first host of step 17\.2, is"):
        joining._address_of(dataclasses.replace(TASK, first_host="no.such.host.invalid"))
    assert joining._address_of(TASK) == ("localhost", TASK.port)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert joining._address_of(TASK) == ("127.0.0.1", 1234)
