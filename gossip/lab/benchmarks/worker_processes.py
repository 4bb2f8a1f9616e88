"""Processes of a benchmark's ranks: started, awaited, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from gossip import LaunchError
from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place, Record
from gossip.lab.benchmarks.network.networks import Network
from gossip.lab.experiments.records import read_jsonl

_POLL_S = 0.1
_GRACE_S = 1.0  # time for the rank that caused the failure to report it
_LAST_LINES = 12


def run_workers(
    name: str,
    case: BenchmarkSettings,
    network: Network,
    folder: Path,
    on_record: Callable[[int, Record], None] = lambda *_: None,
) -> list[list[Record]]:
    """Run one process per rank until all have finished their measurements.

    Parameters
    ----------
    name : str
        The name of the benchmark.
    case : BenchmarkSettings
    network : Network
        The network on which the processes run.
    folder : Path
        The folder for the settings and each rank's rank<i>.json (its place), rank<i>.jsonl (its records) and
        rank<i>.log (its output).
    on_record : callable
        A function that is called with the number of each record of rank 0, and with the record, as soon as it is
        written.

    Returns
    -------
    list of list of dict
        The records of each rank.

    Raises
    ------
    LaunchError
        A rank failed, or no rank made progress for too long; no process is left running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(case.model_dump_json(indent=2) + "\n", encoding="utf-8")
    store = network.start_store(timedelta(seconds=case.timeout_s))
    places = [
        Place(
            rank=rank,
            store_address=store.host,
            store_port=store.port,
            address=network.address(rank // case.local_size),
            interface=network.interface,
            num_sharing=case.world_size if network.shared else case.local_size,
            records=str(folder / f"rank{rank}.jsonl"),
        )
        for rank in range(case.world_size)
    ]
    with contextlib.ExitStack() as processes:
        running = [processes.enter_context(_started(name, place, case, network)) for place in places]
        _wait(running, places, case.timeout_s, on_record)
    del store
    return [read_jsonl(place.records) for place in places]


@contextlib.contextmanager
def _started(name: str, place: Place, case: BenchmarkSettings, network: Network) -> Iterator[subprocess.Popen[bytes]]:
    """Run the worker within the block, and kill it at the end of the block."""
    path = Path(place.records).with_suffix(".json")
    path.write_text(place.model_dump_json(indent=2) + "\n", encoding="utf-8")
    Path(place.records).touch()
    with _log(place).open("wb") as log, network.entered(place.rank // case.local_size):
        process = subprocess.Popen(
            [sys.executable, "-m", "gossip.lab.benchmarks.benchmark_worker", name, str(path)],
            env={**os.environ, "OMP_NUM_THREADS": str(case.num_threads)},
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
    places: Sequence[Place],
    timeout_s: float,
    on_record: Callable[[int, Record], None],
) -> None:
    num_seen = 0
    while True:
        statuses = [process.poll() for process in running]
        for record in read_jsonl(places[0].records)[num_seen:]:
            on_record(num_seen, record)
            num_seen += 1
        if any(statuses):
            time.sleep(_GRACE_S)
            _fail(running, places)
        if all(status == 0 for status in statuses):
            return
        newest = max(Path(place.records).stat().st_mtime for place in places)
        if time.time() - newest > 2 * timeout_s:  # the ranks' own time-outs expire first, and name the missing rank
            raise LaunchError(f"no worker made a step within {2 * timeout_s:g} s; raise timeout_s")
        time.sleep(_POLL_S)


def _fail(running: Sequence[subprocess.Popen[bytes]], places: Sequence[Place]) -> None:
    """Raise the error of the failed rank whose last output is the oldest."""
    failed = [place for process, place in zip(running, places, strict=True) if process.poll()]
    first = min(failed, key=lambda place: _log(place).stat().st_mtime)
    words = _log(first).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    status = running[first.rank].returncode
    how = words[-1] if words else f"it ended without an error message, with status {status}"
    tail = "".join(f"{line}\n" for line in words[-_LAST_LINES:])
    raise LaunchError(f"rank {first.rank} failed: {how}", rank=first.rank, worker_traceback=tail)


def _log(place: Place) -> Path:
    return Path(place.records).with_suffix(".log")
