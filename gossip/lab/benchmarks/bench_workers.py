"""Processes of a benchmark's ranks: started, awaited, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from gossip import LaunchError
from gossip.lab.benchmarks.bench_settings import Settings
from gossip.lab.benchmarks.bench_specification import WorkerSpecification, WorkerTask
from gossip.lab.benchmarks.networks import Network
from gossip.lab.experiments.records import read_jsonl

Record = dict[str, Any]
_POLL_S = 0.1
_GRACE_S = 1.0  # time for the rank that caused the failure to report it
_LAST_LINES = 12


def measure(
    settings: Settings, network: Network, folder: Path, on_record: Callable[[Record], None] = lambda _: None
) -> list[list[Record]]:
    """Run one process per rank until all have finished their measurements.

    Parameters
    ----------
    settings : Settings
    network : Network
        The network on which the processes run.
    folder : Path
        The folder for each rank's rank<i>.json (its task), rank<i>.jsonl (its records) and rank<i>.log (its output).
    on_record : callable
        A function that is called with each record of rank 0 as soon as it is written.

    Returns
    -------
    list of list of dict
        The records of each rank.

    Raises
    ------
    LaunchError
        A rank failed, or no rank made progress for too long; no process is left running.
    """
    make = partial(
        WorkerSpecification,
        methods=settings.methods,
        model=settings.model,
        straggler=settings.straggler,
        repetitions=settings.repetitions,
        warmup_steps=settings.warmup_steps,
        steps=settings.steps,
        seed=settings.seed,
        num_threads=settings.num_threads,
        probe_bucket_cap_mb=settings.probe_bucket_cap_mb,
    )
    return run_workers(
        "gossip.lab.benchmarks.bench_worker",
        make,
        network,
        folder,
        world_size=settings.world_size,
        local_size=settings.local_size,
        timeout_s=settings.timeout_s,
        on_record=on_record,
    )


def run_workers(
    program: str,
    make: Callable[..., WorkerTask],
    network: Network,
    folder: Path,
    *,
    world_size: int,
    timeout_s: float,
    on_record: Callable[[Record], None],
    local_size: int = 1,
) -> list[list[Record]]:
    """Run one process of a program per rank until all have ended; returns and raises as :func:`measure` does.

    Parameters
    ----------
    program : str
        The name of the module to run, which calls :func:`gossip.lab.benchmarks.bench_worker.attend` last.
    make : callable
        A function that makes a rank's task from keyword arguments for the location of the rank.
    network, folder, on_record
        See :func:`measure`.
    world_size : int
    timeout_s : float
        The time-out of any wait for other ranks.
    local_size : int
        The number of consecutive ranks on each host.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = network.start_store(timedelta(seconds=timeout_s))
    tasks = [
        make(
            rank=rank,
            world_size=world_size,
            store_address=store.host,
            store_port=store.port,
            address=network.address(rank // local_size),
            local_size=local_size,
            interface=network.interface,
            shared_interface=network.shared,
            timeout_s=timeout_s,
            records=str(folder / f"rank{rank}.jsonl"),
        )
        for rank in range(world_size)
    ]
    with contextlib.ExitStack() as processes:
        running = [processes.enter_context(_started(program, task, network, folder)) for task in tasks]
        _wait(running, tasks, timeout_s, on_record)
    del store
    return [read_jsonl(Path(task.records)) for task in tasks]


@contextlib.contextmanager
def _started(
    program: str, specification: WorkerTask, network: Network, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the worker within the block, and kill it at the end of the block."""
    path = folder / f"rank{specification.rank}.json"
    specification.write(path)
    Path(specification.records).touch()
    with _log(specification).open("wb") as log, network.entered(specification.rank // specification.local_size):
        process = subprocess.Popen(
            [sys.executable, "-m", program, str(path)],
            env={**os.environ, "OMP_NUM_THREADS": str(specification.num_threads)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C goes to the controller only
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _wait(
    running: Sequence[subprocess.Popen[bytes]],
    specifications: Sequence[WorkerTask],
    timeout_s: float,
    on_record: Callable[[Record], None],
) -> None:
    num_seen = 0
    while True:
        statuses = [process.poll() for process in running]
        for record in read_jsonl(Path(specifications[0].records))[num_seen:]:
            num_seen += 1
            on_record(record)
        if any(statuses):
            time.sleep(_GRACE_S)
            _fail(running, specifications)
        if all(status == 0 for status in statuses):
            return
        newest = max(Path(specification.records).stat().st_mtime for specification in specifications)
        if time.time() - newest > 2 * timeout_s:  # the ranks' own time-outs expire first, and name the missing rank
            raise LaunchError(f"no worker made a step within {2 * timeout_s:g} s; raise bench.timeout_s")
        time.sleep(_POLL_S)


def _fail(running: Sequence[subprocess.Popen[bytes]], specifications: Sequence[WorkerTask]) -> None:
    """Raise the error of the failed rank whose last output is the oldest."""
    failed = [spec for process, spec in zip(running, specifications, strict=True) if process.poll()]
    first = min(failed, key=lambda spec: _log(spec).stat().st_mtime)
    words = _log(first).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    status = running[first.rank].returncode
    how = words[-1] if words else f"it ended without an error message, with status {status}"
    tail = "".join(f"{line}\n" for line in words[-_LAST_LINES:])
    raise LaunchError(f"rank {first.rank} failed: {how}", rank=first.rank, worker_traceback=tail)


def _log(specification: WorkerTask) -> Path:
    return Path(specification.records).with_suffix(".log")
