"""What SLURM's variables say of a step, and where its tasks meet: at its own place, or an error in one line."""

import dataclasses
import re
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from free_ports import free_port

from gossip import LaunchError
from gossip.launching import joining
from gossip.launching.joining import find_placement
from gossip.launching.slurm import FIRST_PORT, NUM_PORTS, Step, first_host, step_of

TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "node[08-10]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_NTASKS": "9",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "4,5,6,7",
}


def test_step_of_a_task() -> None:
    step = step_of({**TASK, "SLURM_RESTART_COUNT": "3"})
    assert (step.job, step.step, step.restarts) == (17, 2, 3)
    assert (step.task, step.num_tasks, step.local_task, step.num_local_tasks) == (5, 9, 1, 4)
    assert (step.node, step.num_nodes, step.first_host, step.keeps_store) == (1, 3, "node08", False)
    first = step_of({**TASK, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1,2,3"})
    assert first.keeps_store
    assert first.port == step.port


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "3"},  # a batch script
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"},
        # What a batch script finds that was submitted from within a step of two tasks: on one node, and on two.
        TASK | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS"), "0"),
        TASK
        | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS"), "0")
        | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_JOB_NUM_NODES": "1"},
    ],
)
def test_step_of_what_is_no_step_of_several_tasks(variables: dict[str, str]) -> None:
    assert step_of(variables) is None
    assert find_placement(variables) is None


def test_placement_prefers_the_ranks_of_torchrun() -> None:
    placement = find_placement({**TASK, "RANK": "1", "WORLD_SIZE": "2"})
    assert (placement.rank, placement.world_size, placement.step) == (1, 2, None)
    assert placement.variables == "RANK=1 and WORLD_SIZE=2"
    placement = find_placement(TASK)
    assert (placement.rank, placement.world_size) == (5, 9)
    assert placement.variables == "SLURM_PROCID=5 and SLURM_STEP_NUM_TASKS=9"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("SLURM_STEP_NUM_TASKS", "many", "SLURM_STEP_NUM_TASKS must be a number in a SLURM step, got 'many'"),
        ("SLURM_STEP_NODELIST", "node[1-", "SLURM_STEP_NODELIST='node[1-' is not a list of hosts"),
        ("SLURM_STEP_NODELIST", "node[a-b]", "SLURM_STEP_NODELIST='node[a-b]' is not a list of hosts"),
        ("SLURM_STEP_NODELIST", "", "SLURM_STEP_NODELIST='' is not a list of hosts"),
        ("SLURM_STEP_TASKS_PER_NODE", "4x2", "'4x2' is not a list of tasks per node"),
    ],
)
def test_step_of_refuses_what_makes_no_sense(name: str, value: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        step_of({**TASK, name: value})


@pytest.mark.parametrize(
    ("node_list", "expected"),
    [
        ("vm", "vm"),
        ("node[01-03,7],gpu5", "node01"),
        ("gpu5,node[9-11]", "gpu5"),
        ("rack[0-1]n[098-099]-ib", "rack0n098-ib"),
        ("a-b.c[3]", "a-b.c3"),
    ],
)
def test_first_host_of_a_node_list(node_list: str, expected: str) -> None:
    assert first_host(node_list) == expected


def test_port_differs_between_steps_at_the_same_time() -> None:
    ports = {}
    for job in range(1_000_000, 1_000_100):
        for step in range(20):
            found = step_of({**TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
            assert FIRST_PORT <= found.port < FIRST_PORT + NUM_PORTS <= 32768
            ports[job, step] = found.port
    assert len(set(ports.values())) == len(ports)


# ---------------------------------------------------------------------- where its tasks meet


STEP = Step(17, 2, 0, 0, 2, 0, 2, 0, 1, "localhost")
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
    second = dataclasses.replace(STEP, task=1, local_task=1)
    with pytest.raises(LaunchError, match=r"is another program's key-value store, not that of step 17\.2; set MASTER_"):
        joining._store_of(second, other_store, TIMEOUT)


def test_first_task_refuses_a_port_that_is_taken(other_store: tuple[str, int]) -> None:
    with pytest.raises(LaunchError, match=rf"port {other_store[1]} on 127\.0\.0\.1, where step 17\.2 would keep its"):
        joining._store_of(STEP, other_store, TIMEOUT)


def test_store_of_a_step_on_one_node_is_for_that_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_stores", {})
    port = free_port()
    store = joining._store_of(STEP, ("127.0.0.1", port), TIMEOUT)
    second = joining._store_of(dataclasses.replace(STEP, task=1, local_task=1), ("127.0.0.1", port), TIMEOUT)
    assert second is store  # a process that joins again keeps it
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=5):  # noqa: PT011
        pass


def test_unknown_first_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(LaunchError, match=r"the address of no\.such\.host\.invalid, the first host of step 17\.2, is"):
        joining._address_of(dataclasses.replace(STEP, first_host="no.such.host.invalid"))
    assert joining._address_of(STEP) == ("localhost", STEP.port)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert joining._address_of(STEP) == ("127.0.0.1", 1234)
