"""Means over ranks from files that grow go to loggers; where these fail, hang or are slow, the run goes on and ends."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gossip.lab.experiments.records import JsonlWriter
from gossip.lab.loggers import log_forwarding
from gossip.lab.loggers.log_forwarding import LogForwarding, RecordStream
from gossip.lab.loggers.logger import Beginning, Ending
from gossip.lab.loggers.logger_choice import LOGGERS

DONE = Ending("completed", {"loss": 0.5}, (), Path("model"))


class Kept:
    """A logger whose run outlives it, as one on a server does; ``faults`` are called before each record."""

    libraries: tuple[str, ...] = ()
    steps: list[int]
    endings: list[Ending]
    beginnings: list[Beginning]
    fault: Callable[[int], None]

    def begin(self, beginning: Beginning) -> int:
        self.beginnings.append(beginning)
        return len(self.steps)

    def log(self, step: int, values: Mapping[str, Any]) -> None:  # noqa: ARG002
        type(self).fault(step)
        self.steps.append(step)

    def flush(self) -> None:
        pass

    def end(self, ending: Ending) -> None:
        self.endings.append(ending)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Kept]]:
    """The logger "kept", and no pauses."""
    monkeypatch.setattr(log_forwarding, "_PAUSE_S", 0.001)
    monkeypatch.setattr(log_forwarding, "_RETRY_S", 0.001)
    monkeypatch.setitem(LOGGERS._entries, "kept", Kept)
    Kept.steps, Kept.endings, Kept.beginnings, Kept.fault = [], [], [], staticmethod(lambda _: None)
    yield Kept
    for thread in threading.enumerate():
        if thread.name == "gossip-kept":
            thread.join()


def start(folder: Path, step: int = 0, **logging: Any) -> LogForwarding:
    config = {"logger": {"jsonl": {}, "kept": {}}, "logging": logging, "launch": {"world_size": 2}, "seed": 3}
    return LogForwarding(config, folder, step)


def write(folder: Path, rank: int | str, steps: Sequence[int], **values: Any) -> None:
    """Append records whose loss is 10 step + rank."""
    name = f"rank{rank}.jsonl" if isinstance(rank, int) else rank
    with JsonlWriter(folder / name) as writer:
        for step in steps:
            loss = 10 * step + (rank if isinstance(rank, int) else 0)
            writer.write({"step": step, "loss": loss, **values})


def train(folder: Path, steps: Sequence[int]) -> None:
    for rank in range(2):
        write(folder, rank, steps)


def test_forwarding_brings_all_and_leaves_nothing(tmp_path: Path, kept: type[Kept], warnings_told: list[str]) -> None:
    follows = start(tmp_path, name="mine", group="g", tags=["a"])
    assert follows
    train(tmp_path, range(700))
    follows.end(DONE)
    assert kept.steps == list(range(700))
    (ending,) = kept.endings
    assert ending.summary == {"loss": 0.5}
    assert ending.model is None  # it was not asked for
    (beginning,) = kept.beginnings
    assert (beginning.name, beginning.group, beginning.tags) == ("mine", "g", ("a",))
    assert (beginning.world_size, beginning.step) == (2, 0)
    assert beginning.config == {"launch": {"world_size": 2}, "seed": 3}
    assert warnings_told == []
    assert {path.name for path in tmp_path.iterdir()} == {"rank0.jsonl", "rank1.jsonl"}


def test_forwarding_of_a_run_that_goes_on_has_each_step_once(tmp_path: Path, kept: type[Kept]) -> None:
    kept.steps += range(5)
    train(tmp_path, range(3))
    follows = start(tmp_path, step=3)
    train(tmp_path, range(3, 9))
    follows.end(DONE)
    assert kept.steps == list(range(9))
    assert kept.beginnings[0].step == 3


def test_forwarding_warns_once_of_an_outage(tmp_path: Path, kept: type[Kept], warnings_told: list[str]) -> None:
    failures: list[int] = []

    def fault(step: int) -> None:
        if step == 5 and len(failures) < 4:
            failures.append(step)
            raise ConnectionError("the server\nis away")

    kept.fault = staticmethod(fault)
    follows = start(tmp_path)
    train(tmp_path, range(9))
    follows.end(DONE)
    assert len(failures) == 4
    assert kept.steps == list(range(9))
    assert len(kept.endings) == 1
    (line,) = warnings_told
    assert "logger=kept has failed (ConnectionError: the server is away); training is not affected" in line


def test_forwarding_leaves_one_that_hangs_alone(tmp_path: Path, kept: type[Kept], warnings_told: list[str]) -> None:
    hangs, may_go_on = threading.Event(), threading.Event()

    def fault(step: int) -> None:
        if step == 2:
            hangs.set()
            may_go_on.wait()

    kept.fault = staticmethod(fault)
    follows = start(tmp_path, wait_s=0.01)
    train(tmp_path, range(3))
    hangs.wait()
    train(tmp_path, range(3, 5))  # nobody waits
    follows.end(DONE)
    (line,) = warnings_told
    assert f"logger=kept has not taken everything; training is not affected, and its records are in {tmp_path}" in line
    assert kept.steps == [0, 1]
    may_go_on.set()
    for thread in threading.enumerate():
        if thread.name == "gossip-kept":
            thread.join()
    assert kept.endings == []  # it is not begun on what nobody waits for


def test_forwarding_a_failed_run_leaves_half_steps_for_its_next_attempt(tmp_path: Path, kept: type[Kept]) -> None:
    follows = start(tmp_path)
    train(tmp_path, range(3))
    write(tmp_path, 0, [3])
    follows.end(Ending("failed", {"reason": "it"}))
    assert kept.steps == [0, 1, 2]
    assert kept.endings[0].status == "failed"


def test_forwarding_a_refused_run_begins_nothing(tmp_path: Path, kept: type[Kept]) -> None:
    start(tmp_path).end(None)
    assert kept.beginnings == []
    assert list(tmp_path.iterdir()) == []


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
    train(tmp_path, range(2, 4))  # then two, resumed with three at step 4
    stream = means(tmp_path, 3, step=4)
    assert losses(stream) == {0: 0, 1: 10, 2: 20.5, 3: 30.5}
    train(tmp_path, [4])
    assert losses(stream) == {}
    write(tmp_path, 2, [4])
    assert losses(stream) == {4: 41}


def test_mean_takes_what_there_is_once_the_run_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 0, range(3))  # the others are on a machine without this folder
    stream = means(tmp_path, 2)
    assert losses(stream) == {}
    assert losses(stream, is_whole=True) == {0: 0, 1: 10, 2: 20}


@pytest.mark.parametrize("first", [3, 500])
def test_streams_begin_at_a_step_and_hold_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(log_forwarding, "AHEAD", 4)
    train(tmp_path, range(100))
    stream = RecordStream(Beginning(tmp_path, 2), first)
    found: dict[int, float] = {}
    while batch := losses(stream, limit=7):
        assert len(batch) <= 7
        assert all(len(file.waiting) <= 4 for file in stream.files.values())
        found |= batch
    assert found == {step: 10 * step + 0.5 for step in range(first, 100)}
