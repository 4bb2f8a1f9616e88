"""What scripts/train.py says and leaves when a run goes wrong."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from pathlib import Path

import pytest
from running import Finished, run_folders, running, train

FAULTY = (
    "model._target_=faulty_models.FailingModel",
    "trusted_targets=[faulty_models]",
    "~model.hidden",
    "training.epochs=1",
    "launch.world_size=3",
)
NO_CHECKPOINT = "there is no checkpoint to go on from; checkpoint.every=N saves one every N steps"


def test_train_rank_that_raises_is_shown_with_its_traceback(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTY, "+model.rank=2", "+model.step=3", "+model.how=raise")
    assert run.status == 1
    failure = "rank 2 failed: ArithmeticError: injected at step 3"
    assert run.last_lines(2) == [failure, NO_CHECKPOINT]
    assert run.stderr.count("Traceback") == 1
    assert "in fail" in run.stderr
    assert run.left_running == ()
    (folder,) = run_folders(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", failure)


def test_train_under_torchrun_records_the_rank_that_raised(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTY, "+model.rank=1", "+model.how=raise", torchrun=2)
    assert run.status != 0
    assert "rank 1 failed: ArithmeticError: injected at step 3" in run.stderr.splitlines()
    (folder,) = run_folders(tmp_path)
    reason = json.loads((folder / "summary.json").read_text())["reason"]
    assert reason == "rank 1 failed: ArithmeticError: injected at step 3"
    assert run.stderr.splitlines().count(NO_CHECKPOINT) == 1


HUNG = {
    "with checkpoints": (
        ("checkpoint.every=2",),
        "step 4, after which all stop, has not ended",
        "go on from step 2 with resume=",
    ),
    "without checkpoints": ((), "the call that the main thread is in has not returned", NO_CHECKPOINT),
}
"""The options of runs of which both ranks' calls hang, why nothing is saved then, and what is advised."""


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Finished]]:
    """Their folders and ends: they wait most of their time, side by side."""
    folders = {name: tmp_path_factory.mktemp("hung") for name in HUNG}
    both_ranks = ("+model.rank=null", "+model.step=3", "+model.how=stuck")
    with contextlib.ExitStack() as stack:
        runs = {
            name: stack.enter_context(running(folders[name], *FAULTY, *both_ranks, *options, torchrun=2))
            for name, (options, _, _) in HUNG.items()
        }
        return {name: (folders[name], run.finished()) for name, run in runs.items()}


@pytest.mark.slow
@pytest.mark.xdist_group("train_hangs")
@pytest.mark.parametrize("name", HUNG)
def test_train_under_torchrun_ends_and_says_how_to_go_on_though_a_call_hangs(
    name: str, hung: dict[str, tuple[Path, Finished]]
) -> None:
    _, why, advice = HUNG[name]
    path, run = hung[name]
    assert run.status != 0
    said = run.stderr.splitlines()
    assert sum(line.startswith(advice) for line in said) == 1
    assert any(line.startswith("rank ") and line.endswith("nothing is saved") for line in said)
    (folder,) = run_folders(path)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert re.fullmatch(rf"rank [01] failed: 5 s after SIGTERM: {why}; nothing is saved", summary["reason"])


def test_train_ctrl_c_ends_everything(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTY, "+model.how=interrupt")
    assert run.status == 130
    assert run.last_lines(2) == ["interrupted", NO_CHECKPOINT]
    assert "Traceback" not in run.stderr
    assert run.left_running == ()
    (folder,) = run_folders(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reason"] == "interrupted (Ctrl-C)"


def test_train_ctrl_c_before_there_are_workers(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTY, "+model.how=interrupt_check", fresh=True)
    assert run.status == 130
    assert run.stderr == f"interrupted\n{NO_CHECKPOINT}\n"  # the fork server, amid its imports, has nothing to say
    assert run.left_running == ()


def test_train_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = train(tmp_path, f"launch.port={port}")
    assert run.status == 2
    (line,) = [line for line in run.stderr.splitlines() if " INFO " not in line]
    assert line.startswith(f"error: port {port} on 127.0.0.1 is taken")
