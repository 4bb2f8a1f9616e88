"""What a sweep says while it runs."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from gossip.lab.experiments.run_folder import SUMMARY_FILE
from gossip.lab.sweeps.sweep_progress import LOGS, line, told

TIMEOUT_S = 30


@pytest.mark.parametrize(
    ("num_ended", "elapsed_s", "text"),
    [
        (3, 3.0, "3 of 12 runs have ended, about 9 s left"),
        (6, 300.0, "6 of 12 runs have ended, about 5 min left"),
        (1, 1000.0, "1 of 12 runs have ended, about 3.1 h left"),
    ],
)
def test_time_is_left_at_the_pace_so_far(num_ended: int, elapsed_s: float, text: str) -> None:
    assert line(num_ended, 12, elapsed_s) == text


def test_runs_that_have_ended_are_counted_until_all_have(tmp_path: Path) -> None:
    said: queue.Queue[str] = queue.Queue()

    def end(name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / SUMMARY_FILE).touch()

    with told(["a", "b", "c"], tmp_path, pause_s=0.001, say=said.put):
        end("a")
        assert said.get(timeout=TIMEOUT_S).startswith("1 of 3 runs")
        end("b")
        assert said.get(timeout=TIMEOUT_S).startswith("2 of 3 runs")
        end("c")
    assert said.empty(), "that all have ended is what the report says"


def test_job_array_is_named_once_and_not_one_of_an_earlier_command(tmp_path: Path) -> None:
    said: queue.Queue[str] = queue.Queue()
    logs = tmp_path / LOGS
    (logs / "41_0").mkdir(parents=True)
    with told(["a", "b"], tmp_path, pause_s=0.001, say=said.put):
        for name in ("42_0", "42_1", "4711", "%j"):
            (logs / name).mkdir()
        assert said.get(timeout=TIMEOUT_S) == (
            f"SLURM job array 42: squeue --job 42 lists its tasks, {logs} has their output"
        )
    assert said.empty()


def test_job_array_of_runs_that_end_at_once_is_named_too(tmp_path: Path) -> None:
    said: list[str] = []
    with told(["a"], tmp_path, pause_s=TIMEOUT_S, say=said.append):
        (tmp_path / LOGS / "42_0").mkdir(parents=True)
    assert [text.partition(":")[0] for text in said] == ["SLURM job array 42"]
