"""One rank of a benchmark: ``python -m gossip.lab.benchmarks.benchmark_worker BENCHMARK rank<i>.json``.

The worker watches its standard input: when the controller ends, for whatever reason, so does the worker.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from loguru import logger

from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place
from gossip.lab.benchmarks.benchmark_names import BENCHMARKS
from gossip.lab.experiments.records import JsonlWriter


def main() -> NoReturn:
    """Run the benchmark that the command line names, and exit. Collective."""
    try:
        _run(sys.argv[1], Path(sys.argv[2]))
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the process must exit even if communication can no longer finish


def _run(name: str, path: Path) -> None:
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    threading.Thread(target=_leave_with_controller, name="controller-watch", daemon=True).start()
    place = Place.model_validate_json(path.read_text(encoding="utf-8"))
    settings = path.with_name("settings.json").read_text(encoding="utf-8")
    case = BENCHMARKS[name].settings.model_validate_json(settings)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    os.environ["LOCAL_WORLD_SIZE"] = str(case.local_size)
    torch.set_num_threads(case.num_threads)
    timeout = timedelta(seconds=case.timeout_s)
    store = dist.TCPStore(place.store_address, place.store_port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=case.world_size, timeout=timeout)
    work(name, case, place)
    dist.destroy_process_group()


def work(name: str, case: BenchmarkSettings, place: Place) -> None:
    """Measure, and write every record as soon as it is known. Collective."""
    with JsonlWriter(place.records) as writer:
        for record in BENCHMARKS[name]().work(case, place):
            writer.write(record)


def _leave_with_controller() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
