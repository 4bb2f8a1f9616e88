"""Training goes on under random faults, and what would be wrong is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS, running

from gossip.lab.faults.chaos_run import examine


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the report of a short run."""
    folder = tmp_path_factory.mktemp("chaos") / "run"
    options = ("--seconds", "8", "--ranks", "5", "--steps-between-faults", "20", "--seed", "3", "--timeout-s", "1")
    with running(folder.parent, str(folder), *options, script=SCRIPTS / "chaos.py") as script:
        finished = script.finished()
    assert finished.status == 0, finished.stderr
    assert finished.left_running == ()
    assert finished.stdout.strip().endswith((folder / "report.md").read_text().strip())
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return folder, report


@pytest.mark.xdist_group("chaos")
def test_nothing_is_torn_and_the_mean_is_moved_by_updates_alone(chaos: tuple[Path, dict[str, Any]]) -> None:
    _, report = chaos
    assert sum(report["faults"].values()) >= 2
    assert report["num_joined"] >= 1
    assert report["num_messages_mixed"] > 100
    assert report["num_messages_torn"] == 0
    assert report["num_steps_compared"] > 50
    assert report["drift_of_the_mean"] < 1e-11
    assert len(report["accuracies"]) == 1
    assert report["accuracies"][0] > 0.8


@pytest.mark.xdist_group("chaos")
def test_a_torn_message_would_be_seen(chaos: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, report = chaos
    for path in folder.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    mixed = tmp_path / "mixed0.jsonl"
    first, *others = mixed.read_text().splitlines(keepends=True)
    *key, digest = json.loads(first)
    mixed.write_text(json.dumps([*key, digest[::-1]]) + "\n" + "".join(others))
    found = examine(tmp_path, [])
    assert found["num_messages_torn"] == 1
    assert found["num_messages_mixed"] == report["num_messages_mixed"]


@pytest.mark.xdist_group("chaos")
def test_a_mean_that_is_moved_by_something_else_would_be_seen(
    chaos: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = chaos
    for path in folder.glob("*.jsonl"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    steps = tmp_path / "steps0.jsonl"
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    for line in lines[3:]:
        line[2] += 1e-3
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert examine(tmp_path, [])["drift_of_the_mean"] == pytest.approx(1e-3, rel=1e-6)


def test_a_folder_that_is_there_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, str(tmp_path), script=SCRIPTS / "chaos.py") as script:
        finished = script.finished()
    assert finished.status == 2
    assert "is there already; name a new folder" in finished.stderr
