"""Workers start, report, fail and leave as a caller can rely on."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lone_ranks import wait_until
from ranks import fail_on
from running import run, running, written

import gossip
from gossip import LaunchError, launch
from gossip.launching import fork_server, joining


def rank_times(factor: int) -> tuple[int, int, str]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank() * factor, int(total), os.environ["LOCAL_RANK"]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_launch_returns_results_by_rank(world_size: int) -> None:
    assert launch(rank_times, 3, world_size=world_size) == [
        (3 * rank, world_size, str(rank)) for rank in range(world_size)
    ]


def test_launch_starts_a_worker_for_each_core_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5})
    assert launch(torch.get_num_threads) == [1, 1]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "rank 2 failed: ZeroDivisionError: no luck"),
        ("kill", r"rank 2 failed: the process ended without an error message, with signal 9 \(SIGKILL\)"),
        ("exit", "rank 2 failed: the process ended without an error message, with exit status 7"),
    ],
)
def test_launch_names_the_rank_that_failed(how: str, text: str) -> None:
    with pytest.raises(LaunchError, match=text) as caught:
        launch(fail_on, 2, how, world_size=4)
    assert caught.value.rank == 2
    assert ("fail_on" in caught.value.worker_traceback) == (how == "raise")


def process_id() -> int:
    return os.getpid()


def lowest_free_descriptor() -> int:
    """As a limit, it lets no further file be opened."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def open_no_further_file() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), hard))


def construct_with_few_files(on_peer_loss: str) -> None:
    open_no_further_file()
    gossip.GossipDataParallel(torch.nn.Linear(1, 1), None, on_peer_loss=on_peer_loss, timeout=timedelta(seconds=10))


def open_a_file_too_many() -> None:
    open_no_further_file()
    open(os.devnull).close()


@pytest.mark.parametrize(
    "call", [(construct_with_few_files, "raise"), (construct_with_few_files, "continue"), (open_a_file_too_many,)]
)
def test_a_rank_that_may_open_too_few_files_names_their_limit(call: tuple[Any, ...]) -> None:
    text = r"(?s)rank \d failed: .*open files.* the limit of this process is \d+; raise it with `ulimit -n`"
    with pytest.raises(LaunchError, match=text):
        launch(*call, world_size=2)


def test_a_launcher_that_may_open_too_few_files_names_their_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = lowest_free_descriptor() + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with pytest.raises((OSError, RuntimeError)) as caught:
            launch(process_id, world_size=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (note,) = caught.value.__notes__
    assert f"too many open files: the limit of this process is {limit}; raise it with `ulimit -n`" in note


def test_temporary_files_without_a_path_that_is_short_enough_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_SHORT_FOLDERS", (str(tmp_path / "missing"),))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", "/" + "a" * 100)
    with pytest.raises(
        LaunchError, match=r"TMPDIR: .*aaa, whose path is longer than the 89 bytes that are .* shorter path"
    ):
        fork_server.start(())


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            "world_size is 4, but this process is rank 0 of 1, because RANK=0 and WORLD_SIZE=1 are set",
        ),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK= and WORLD_SIZE=2 are set, but must be numbers; unset them to start"),
    ],
)
def test_launch_names_the_variables_that_make_it_one_of_other_ranks(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=text):
        launch(process_id, world_size=4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"port": 99999}, "port must be from 0 to 65535, got 99999"),
        ({"num_threads": -1}, "num_threads must be at least 1, got -1"),
        ({"timeout": 20}, r"timeout must be a .*, got 20; write timedelta"),
        ({"restart": 1}, 'restart=1 needs other ranks that continue and can be joined; pass on_peer_loss="continue"'),
        ({"restart": True, "on_peer_loss": "continue"}, "restart must be an integer of at least 0, got True"),
        ({"function": lambda: None}, "define the function at the top level of a module or script"),
    ],
)
def test_launch_refuses_arguments_with_the_reason(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        launch(**{"function": process_id, "world_size": 1} | arguments)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (threading.Lock, "rank 0 failed: TypeError: its result cannot be pickled"),
        (functools.partial(launch, process_id, world_size=1), "gossip.launch was called inside a worker"),
    ],
)
def test_launch_says_what_a_worker_did_wrong(function: Callable[[], object], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        launch(function, world_size=1)


PRINTING_SCRIPT = """
from gossip import launch

def speak():
    print("hello")
    raise ValueError("boom")

{guard}launch(speak, world_size=1)
"""


@pytest.mark.slow
def test_launch_keeps_what_a_failing_worker_printed_also_where_temporary_files_have_long_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("a" * 120)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script = written(tmp_path, PRINTING_SCRIPT.format(guard="if __name__ == '__main__': "))
    ended = run(script, tmp_path, fresh=True)
    assert ended.stdout == "hello\n"
    assert "rank 0 failed: ValueError: boom" in ended.stderr


def test_launch_asks_for_the_guard_of_the_main_script(tmp_path: Path) -> None:
    ended = run(written(tmp_path, PRINTING_SCRIPT.format(guard="")), tmp_path)
    assert ended.status != 0
    last = ended.stderr.rstrip().splitlines()[-1]
    assert last.startswith("gossip.errors.LaunchError: rank ")
    assert last.endswith('put the call under if __name__ == "__main__":')


@pytest.mark.parametrize("place", [{}, {"__file__": "<stdin>"}])
def test_launch_from_standard_input_is_refused(place: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    vars(main).update(place)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(TypeError, match="was defined in an interactive session, from which workers cannot import it"):
        exec(PRINTING_SCRIPT.format(guard=""), vars(main))


TORCHRUN_SCRIPT = """
import os

import torch.distributed as dist
from gossip import launch

def ranks():
    return dist.get_rank(), dist.get_world_size()

def fail():
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.barrier()

if __name__ == "__main__":
    os.write(1, f"result {launch(ranks)}\\n".encode())  # one write: lines must not mingle
    launch(fail, world_size=2)
"""


def test_launch_joins_torchrun_and_ends_with_the_traceback(tmp_path: Path) -> None:
    ended = run(written(tmp_path, TORCHRUN_SCRIPT), tmp_path, torchrun=2)
    found = sorted(line for line in ended.stdout.splitlines() if line.startswith("result"))
    assert found == ["result [(0, 2)]", "result [(1, 2)]"], ended
    assert ended.status == 1
    assert "ValueError: boom" in ended.stderr


def test_no_rank_of_torchrun_begins_before_all_have_opened_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    store, begun = dist.HashStore(), []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(joining, "_joins", itertools.repeat(0))
    for rank, timeout_ms in enumerate((10, 60_000)):
        place = iter([(store, rank, 2)])
        monkeypatch.setattr(dist, "rendezvous", lambda *_, place=place, **__: place)
        refused = pytest.raises(LaunchError, match="rank 0: another of 2 ranks ended while the process group was made")
        joined = joining.joined_process_group(timeout=timedelta(milliseconds=timeout_ms))
        with contextlib.nullcontext() if rank else refused, joined:
            begun.append(rank)
    assert begun == [1]


WAITING_SCRIPT = """
import os, threading
import torch.distributed as dist
from gossip import launch

def wait():
    process_ids = [None, None]
    dist.all_gather_object(process_ids, os.getpid())
    if dist.get_rank() == 0:
        print(*process_ids)
    threading.Event().wait()

if __name__ == "__main__":
    launch(wait, world_size=2)
"""


PREEMPTED_SCRIPT = """
import functools
import torch
import gossip

def save(model):
    gossip.save(model, "checkpoints")

def train():
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    model = gossip.GossipDataParallel(torch.nn.Linear(2, 1), sgd, on_peer_loss="continue", on_preemption=save)
    while True:
        model(torch.ones(1, 2)).sum().backward()
        if (model.rank, model.step) == (0, 3):
            print("trains", flush=True)

if __name__ == "__main__":
    gossip.launch(train, world_size=3, on_peer_loss="continue", restart=1)
"""


def test_workers_save_and_end_together_where_their_launcher_is_terminated(tmp_path: Path) -> None:
    with running(tmp_path, script=written(tmp_path, PREEMPTED_SCRIPT)) as launcher:
        assert launcher.first_line() == "trains"
        os.kill(launcher.process.pid, signal.SIGTERM)
        ended = launcher.finished()
    assert ended.status == 143, ended.stderr
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) == 1
    assert "failed" not in ended.stderr


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_leave_with_their_launcher(tmp_path: Path, signal_number: signal.Signals) -> None:
    with running(tmp_path, script=written(tmp_path, WAITING_SCRIPT)) as launcher:
        workers = list(map(int, launcher.first_line().split()))
        assert len(workers) == 2
        # Ctrl-C in a terminal reaches the whole process group.
        (os.killpg if signal_number == signal.SIGINT else os.kill)(launcher.process.pid, signal_number)
        assert launcher.process.wait(30) != 0
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
