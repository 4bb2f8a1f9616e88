"""What a sweep says while it runs."""

from __future__ import annotations

import queue
from pathlib import Path
from unittest import mock

from gossip.lab.experiments.run_folder import SUMMARY_FILE
from gossip.lab.sweeps import sweep_progress

TIMEOUT_S = 30


def test_runs_that_have_ended_are_counted_until_all_have(tmp_path: Path) -> None:
    said: queue.Queue[str] = queue.Queue()

    def end(name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / SUMMARY_FILE).touch()

    clock = mock.Mock(**{"monotonic.side_effect": [0.0, 300.0, 360.0]})
    telling = sweep_progress.told(["a", "b", "c"], tmp_path, pause_s=0.001, say=said.put)
    with mock.patch.object(sweep_progress, "time", clock), telling:
        end("a")
        assert said.get(timeout=TIMEOUT_S) == "1 of 3 runs have ended, about 10 min left"
        end("b")
        assert said.get(timeout=TIMEOUT_S) == "2 of 3 runs have ended, about 3 min left"
        end("c")
    assert said.empty(), "that all have ended is what the report says"
