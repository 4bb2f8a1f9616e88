"""Means over ranks from files that grow, while ranks are slow, lost, joining or fewer than before."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gossip.lab.loggers import log_forwarding
from gossip.lab.loggers.log_forwarding import RecordStream
from gossip.lab.loggers.logger import Beginning


def write(folder: Path, rank: int | str, steps: Sequence[int], **values: Any) -> None:
    """Append records whose loss is 10 step + rank."""
    name = f"rank{rank}.jsonl" if isinstance(rank, int) else rank
    with (folder / name).open("a") as file:
        for step in steps:
            loss = 10 * step + (rank if isinstance(rank, int) else 0)
            file.write(json.dumps({"step": step, "loss": loss, **values}) + "\n")


def means(folder: Path, world_size: int, step: int = 0) -> RecordStream:
    return RecordStream(Beginning(folder, world_size, step), 0)


def losses(stream: RecordStream, limit: int = 100, *, is_whole: bool = False) -> dict[int, float]:
    found = stream.read(limit, is_whole=is_whole)
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    return {step: values["loss"] for step, values in found}


def test_mean_of_a_step_waits_for_the_slowest_rank(tmp_path: Path) -> None:
    stream = means(tmp_path, 3)
    assert losses(stream) == {}
    write(tmp_path, 0, range(4))
    write(tmp_path, 1, range(2))
    assert losses(stream) == {}
    write(tmp_path, 2, range(1))
    assert losses(stream) == {0: 1}
    write(tmp_path, 2, range(1, 4))
    assert losses(stream) == {1: 11}
    write(tmp_path, 1, range(2, 4))
    assert losses(stream, limit=1) == {2: 21}
    assert losses(stream) == {3: 31}
    assert losses(stream, is_whole=True) == {}


def test_file_that_a_rank_has_cut_is_read_anew(tmp_path: Path) -> None:
    stream = means(tmp_path, 1)
    write(tmp_path, 0, range(4))
    assert list(losses(stream)) == [0, 1, 2, 3]
    (tmp_path / "rank0.jsonl").write_text("")
    assert losses(stream) == {}
    write(tmp_path, 0, range(2, 6))
    assert losses(stream) == {4: 40, 5: 50}


def test_mean_is_over_those_that_have_a_value(tmp_path: Path) -> None:
    write(tmp_path, 0, [0], wait_by_peer_s={"1": 1.0}, norm=None, diverged=None)
    write(tmp_path, 1, [0], wait_by_peer_s={"1": 3.0, "2": 5.0}, norm=7, diverged=None)
    ((_, values),) = means(tmp_path, 2).read(9, is_whole=False)
    assert math.isnan(values.pop("diverged"))
    assert values == {"loss": 0.5, "wait_by_peer_s/1": 2.0, "wait_by_peer_s/2": 5.0, "norm": 7.0}


def test_mean_after_a_loss_is_that_of_the_others(tmp_path: Path) -> None:
    write(tmp_path, 0, range(3), num_ranks=3)
    write(tmp_path, 1, range(3), num_ranks=3)
    write(tmp_path, 2, range(2), num_ranks=3)  # and is killed in step 2
    stream = means(tmp_path, 3)
    assert losses(stream) == {0: 1, 1: 11}
    write(tmp_path, 0, [3], num_ranks=2)
    assert losses(stream) == {2: 20.5}
    write(tmp_path, 1, [3], num_ranks=2)
    assert losses(stream) == {3: 30.5}


def test_mean_of_what_is_settled_is_over_whoever_made_it(tmp_path: Path) -> None:
    write(tmp_path, "workers.jsonl", range(2))  # in one process, at first
    for rank in range(2):
        write(tmp_path, rank, range(2, 4))  # then two, resumed with three at step 4
    stream = means(tmp_path, 3, step=4)
    assert losses(stream) == {0: 0, 1: 10, 2: 20.5, 3: 30.5}
    for rank in range(2):
        write(tmp_path, rank, [4])
    assert losses(stream) == {}
    write(tmp_path, 2, [4])
    assert losses(stream) == {4: 41}


def test_mean_takes_what_there_is_once_the_run_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 0, range(3))  # the others are on a machine without this folder
    stream = means(tmp_path, 2)
    assert losses(stream) == {}
    assert losses(stream, is_whole=True) == {0: 0, 1: 10, 2: 20}


@pytest.mark.parametrize("first", [3, 500])
def test_streams_begin_at_a_step_and_keep_little_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(log_forwarding, "AHEAD", 4)
    for rank in range(2):
        write(tmp_path, rank, range(100))
    stream = RecordStream(Beginning(tmp_path, 2), first)
    found: dict[int, float] = {}
    while batch := losses(stream, limit=7):
        assert len(batch) <= 7
        assert all(len(file.waiting) <= 4 for file in stream.files.values())
        found |= batch
    assert found == {step: 10 * step + 0.5 for step in range(first, 100)}
