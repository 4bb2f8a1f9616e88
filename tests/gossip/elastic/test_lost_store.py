"""The key-value store dies or stands still while all ranks train: they say so at once, and not at the next loss."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
import unsupervised
from elastic_ranks import make_model, targets
from listening import logged

import gossip
from gossip import ExchangeError
from gossip.communication.liveness.progress_markers import STORE_PATIENCE_S
from gossip.elastic.consensus_store import ConsensusStore
from gossip.elastic.store_monitor import StoreMonitor

SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""
LOST = "the next one that is lost or leaves ends the training of all, and none can join; save a checkpoint now"
BACK = "the key-value store replies again; ranks may be lost, leave and join"


@contextlib.contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server, int(server.stdout.readline())
        finally:
            server.kill()


class Course(NamedTuple):
    """What a rank tells.

    Attributes
    ----------
    warnings : list of str
        What it logged.
    noted : list of bool
        By step, whether its record says that the store is lost.
    end : str
        The error that ended its training.
    """

    warnings: list[str]
    noted: list[bool]
    end: str


def train(folder: str, *, comes_back: bool) -> Course:
    """Two ranks make a step, one more when they know that the store is lost, and end one of them after a checkpoint."""
    rank = dist.get_rank()
    target = targets(rank, 4)
    noted: list[bool] = []
    end = ""
    with logged() as texts, make_model(4, {"topology": "complete", "min_ranks": 1}) as model:

        def step() -> None:
            model(target).backward()
            stats = model.stats()
            assert stats is not None
            noted.append(stats.to_dict()["is_store_lost"])

        def reach(place: str, *, is_lost: bool) -> None:
            (Path(folder) / f"{place}{rank}").touch()
            while model.world.is_store_lost != is_lost:  # type: ignore[attr-defined]
                time.sleep(0.01)
            step()

        step()
        reach("ready", is_lost=True)
        gossip.save(model, folder + "/saved")
        gossip.load(model, folder + "/saved")
        if comes_back:
            reach("noticed", is_lost=False)
        if rank == 1:
            os._exit(9)
        try:
            while model.world_size == 2:
                step()
        except ExchangeError as error:
            end = str(error)
    return Course(texts, noted, end)


def await_places(folder: Path, place: str) -> None:
    while not all((folder / f"{place}{rank}").exists() for rank in range(2)):
        time.sleep(0.01)


def course_of_rank_0(folder: Path, *, comes_back: bool) -> Course:
    with served() as (server, port):
        place = SimpleNamespace(host="127.0.0.1", port=port)
        function = functools.partial(train, str(folder), comes_back=comes_back)
        with (
            mock.patch.object(unsupervised, "store_at", return_value=place),
            unsupervised.started(function, world_size=2) as ranks,
        ):
            await_places(folder, "ready")
            server.send_signal(signal.SIGSTOP if comes_back else signal.SIGKILL)
            if comes_back:
                await_places(folder, "noticed")
                server.send_signal(signal.SIGCONT)
            course: Course
            course, _ = ranks.results()
    return course


def test_ranks_say_once_that_the_store_is_dead_and_save(tmp_path: Path) -> None:
    course = course_of_rank_0(tmp_path, comes_back=False)
    (warning,) = (text for text in course.warnings if "key-value store" in text)
    assert warning.startswith("rank 0: the key-value store does not reply (")
    assert LOST in warning
    assert course.noted[:2] == [False, True]
    assert all(course.noted[1:])
    assert "the key-value store does not reply" in course.end
    assert "without it the remaining ranks cannot agree on who trains" in course.end


@pytest.mark.slow
def test_a_store_that_stood_still_is_of_use_again(tmp_path: Path) -> None:
    course = course_of_rank_0(tmp_path, comes_back=True)
    lost, back = (text for text in course.warnings if "key-value store" in text)
    assert lost.startswith("rank 0: the key-value store has not replied for 2 s")
    assert LOST in lost
    assert BACK in back
    assert course.noted[:3] == [False, True, False]
    assert course.end == "", "it goes on without the other rank"


def test_silence_is_told_from_an_answer_under_way() -> None:
    """By a clock of its own, and once."""
    asked, answers = threading.Event(), threading.Event()

    def wait(*_: Any) -> bool:
        asked.set()
        return answers.wait(60)

    with logged() as texts, mock.patch.object(ConsensusStore, "is_proposed", wait):
        watch = StoreMonitor(3, ConsensusStore(dist.HashStore()), pytest.fail)
        assert asked.wait(60)
        began = time.monotonic()
        watch.look(began)
        assert not watch.is_lost
        for _ in range(2):
            watch.look(began + STORE_PATIENCE_S + 1)
            assert watch.is_lost
        answers.set()
        while watch.is_lost:
            time.sleep(0.01)
        watch.close()
    assert ["rank 3: " in text for text in texts] == [True, True]
