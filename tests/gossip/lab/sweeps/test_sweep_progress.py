"""What a sweep says while it runs."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from gossip.lab.experiments.run_folder import SUMMARY_FILE
from gossip.lab.sweeps.sweep_progress import line, told

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
