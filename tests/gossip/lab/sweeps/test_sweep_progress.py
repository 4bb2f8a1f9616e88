"""What a sweep says while it runs."""

from __future__ import annotations

import queue
from pathlib import Path

from gossip.lab.experiments.run_folder import SUMMARY_FILE
from gossip.lab.sweeps.sweep_progress import line, told

TIMEOUT_S = 30


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
    assert line(3, 12, 300.0) == "3 of 12 runs have ended, about 15 min left"
