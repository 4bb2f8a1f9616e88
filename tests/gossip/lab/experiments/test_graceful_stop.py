"""A signal to any rank stops all of them after the same step, or ends the process if that cannot be had."""

import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from running import run, written

from gossip.lab.experiments.graceful_stop import GracefulStop

PATIENCE_S = 60


class Ring:
    """Ranks that train: none begins a step before its neighbour has made as many as it, but for ``lead``."""

    def __init__(self, world_size: int, lead: int) -> None:
        self.steps = [0] * world_size
        self._lead = lead
        self._changed = threading.Condition()

    def train(self, rank: int, stopping: GracefulStop, after_step: Callable[[int], None]) -> None:
        """Until all stop."""
        neighbour = (rank + 1) % len(self.steps)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.steps[neighbour] + self._lead >= self.steps[rank], PATIENCE_S)
                self.steps[rank] += 1
                self._changed.notify_all()
            after_step(self.steps[rank])
            if not stopping.goes_on(self.steps[rank]):
                return


@pytest.mark.parametrize(
    ("world_size", "lead", "number"), [(1, 0, signal.SIGTERM), (2, 0, signal.SIGUSR1), (5, 3, signal.SIGTERM)]
)
def test_stopping_after_the_same_step_on_all_ranks(world_size: int, lead: int, number: signal.Signals) -> None:
    store, ring = dist.HashStore(), Ring(world_size, lead)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]

    def other_rank(rank: int) -> int | None:
        with GracefulStop(store, rank, lambda: range(world_size), 1) as stopping:
            ring.train(rank, stopping, lambda _: None)
        return stopping.signal_number

    def send(step: int) -> None:
        if step == 20:
            os.kill(os.getpid(), number)

    with ThreadPoolExecutor(world_size) as threads:
        numbers = threads.map(other_rank, range(1, world_size))
        # In the main thread: it gets the signal, and the others do not.
        with GracefulStop(store, 0, lambda: range(world_size), 1) as stopping:
            ring.train(0, stopping, send)
    assert ring.steps == [ring.steps[0]] * world_size
    assert ring.steps[0] >= 20
    assert [stopping.signal_number, *numbers] == [number] * world_size
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert signal.set_wakeup_fd(-1) == -1


def test_stopping_without_a_signal_leaves_nothing() -> None:
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    with GracefulStop(dist.HashStore(), 0, lambda: range(2), 1) as stopping:
        assert all(stopping.goes_on(step) for step in range(1, 4))
    assert stopping.signal_number is None
    assert len(os.listdir("/proc/self/fd")) == descriptors


GIVING_UP = """
import os, signal, threading
import torch.distributed as dist
from gossip.lab.experiments import graceful_stop
from gossip.lab.experiments.graceful_stop import GracefulStop

graceful_stop.GRACE_S = {grace_s}
signal.signal(signal.SIGTERM, lambda number, _: exit(128 + number))
ranks, last_words = range({world_size}), "so: {{}}\\n".format
with GracefulStop(dist.HashStore(), 0, lambda: ranks, 1, saves={saves}, last_words=last_words):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.{name})).start()
    {then}
"""
THEN = "threading.Event().wait(60)"
STUCK = "dist.HashStore().wait(['never'])"


@pytest.mark.parametrize(
    ("world_size", "saves", "name", "then", "text"),
    [
        (3, True, "SIGTERM", THEN, "no answer from ranks 1, 2"),
        (1, True, "SIGTERM", STUCK, "step 1, after which all stop, has not ended"),
        (1, True, "SIGINT", STUCK, "the call that the main thread is in has not returned"),
    ],
)
def test_stopping_gives_up_where_the_ranks_do_not_get_there(
    world_size: int, saves: bool, name: str, then: str, text: str, tmp_path: Path
) -> None:
    program = GIVING_UP.format(world_size=world_size, saves=saves, name=name, then=then, grace_s=0.3)
    ended = run(written(tmp_path, program), tmp_path)
    assert ended.status == 128 + signal.Signals[name]
    why = f"0.3 s after {name}: {text}; nothing is saved"
    assert ended.stderr.splitlines() == [f"rank 0: {why}", f"so: {why}"]


def test_stopping_leaves_signals_to_the_program_where_nothing_is_saved(tmp_path: Path) -> None:
    program = GIVING_UP.format(world_size=2, saves=False, name="SIGTERM", then=THEN, grace_s=30)
    ended = run(written(tmp_path, program), tmp_path, fresh=True)
    assert (ended.status, ended.stderr) == (143, "")
