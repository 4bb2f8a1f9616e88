"""The key-value store dies or stands still while all ranks train: they say so at once, and not at the next loss."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lone_ranks
import pytest
import torch.distributed as dist
import unsupervised
from elastic_ranks import make_model, targets
from listening import logged
from repository import REPOSITORY
from running import running

import gossip
from gossip import ExchangeError
from gossip.communication.liveness.progress_markers import STORE_PATIENCE_S
from gossip.elastic.consensus_store import ConsensusStore
from gossip.elastic.store_monitor import StoreMonitor

LOST = "the next one that is lost or leaves ends the training of all, and none can join; save a checkpoint now"


def train(folder: str) -> tuple[list[str], list[bool], str]:
    """Two ranks make a step, one more when they know that the store is lost, and end one of them after a checkpoint.

    Returns warnings; by step, whether its record says that the store is lost; and the error that ended the training.
    """
    rank = dist.get_rank()
    target = targets(rank, 4)
    noted: list[bool] = []
    end = ""
    with logged() as texts, make_model(4, {"topology": "complete", "min_ranks": 1}) as model:

        def step() -> None:
            model(target).backward()
            noted.append(model.stats().to_dict()["is_store_lost"])

        step()
        (Path(folder) / f"ready{rank}").touch()
        while not model.world.is_store_lost:  # type: ignore[attr-defined]
            time.sleep(0.01)
        step()
        gossip.save(model, folder + "/saved")
        gossip.load(model, folder + "/saved")
        if rank == 1:
            os._exit(9)
        try:
            while model.world_size == 2:
                step()
        except ExchangeError as error:
            end = str(error)
    return texts, noted, end


def test_ranks_say_once_that_the_store_is_dead_and_save(tmp_path: Path) -> None:
    with running(REPOSITORY, "store", "--port", "0", script=lone_ranks.COMMAND) as store:
        place = SimpleNamespace(host="127.0.0.1", port=lone_ranks.port_of(store))
        with (
            mock.patch.object(unsupervised, "store_at", return_value=place),
            unsupervised.started(train, str(tmp_path), world_size=2) as ranks,
        ):
            while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
                time.sleep(0.01)
            os.kill(store.process.pid, signal.SIGKILL)
            (warnings, noted, end), _ = ranks.results()
    (warning,) = (text for text in warnings if "key-value store" in text)
    assert warning.startswith("rank 0: the key-value store does not reply (")
    assert LOST in warning
    assert noted[:2] == [False, True]
    assert all(noted[1:])
    assert "the key-value store does not reply" in end
    assert "without it the remaining ranks cannot agree on who trains" in end


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
