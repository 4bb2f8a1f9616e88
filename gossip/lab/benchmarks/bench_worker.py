"""One rank of a benchmark: ``python -m gossip.lab.benchmarks.bench_worker SPECIFICATION.json``.

The worker watches its standard input: when the controller ends, for whatever reason, so does the worker.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from loguru import logger

from gossip.lab.benchmarks import goodput
from gossip.lab.benchmarks.bench_specification import WorkerSpecification, WorkerTask
from gossip.lab.benchmarks.step_measuring import Measurement, probe
from gossip.lab.experiments.records import without_non_finite

Task = TypeVar("Task", bound=WorkerTask)


def attend(kind: type[Task], run: Callable[[Task], None]) -> NoReturn:
    """Read a task of this kind from the file named on the command line, run it, and exit. Collective."""
    try:
        _run(kind.read(Path(sys.argv[1])), run)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the process must exit even if communication can no longer finish


def _run(task: Task, run: Callable[[Task], None]) -> None:
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    threading.Thread(target=_leave_with_controller, name="controller-watch", daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = task.interface
    os.environ["LOCAL_WORLD_SIZE"] = str(task.local_size)
    torch.set_num_threads(task.num_threads)
    timeout = timedelta(seconds=task.timeout_s)
    store = dist.TCPStore(task.store_address, task.store_port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=timeout)
    run(task)
    dist.destroy_process_group()


def run(spec: WorkerSpecification) -> None:
    """Measure the links and then every method in every repetition, and write a record of each. Collective."""
    path = Path(spec.records)
    with path.open("a", encoding="utf-8", buffering=1) as file:

        def record(content: dict[str, Any]) -> None:
            file.write(json.dumps(without_non_finite(content)) + "\n")

        carried = goodput.measure(
            address=spec.address,
            interface=spec.interface,
            shared=spec.shared_interface,
            local_size=spec.local_size,
            timeout_s=spec.timeout_s,
        )
        record({"goodput_bytes_per_s": carried})
        if spec.probe_bucket_cap_mb is not None:
            record({"goodput_bytes_per_s": None, "probe": asdict(probe(spec))})
        measurement = Measurement(spec, sign_of_life=lambda: os.utime(path))
        for repetition in range(spec.repetitions):
            for method in spec.methods[:: -1 if repetition % 2 else 1]:
                record(measurement.measure(method, repetition))


def _leave_with_controller() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    attend(WorkerSpecification, run)
