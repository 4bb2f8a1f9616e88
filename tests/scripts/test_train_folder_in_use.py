"""Two runs of scripts/train.py cannot share a folder while one of them runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from running import TIMEOUT_S, running, train

from gossip.lab.experiments.run_folder import CONFIG_FILE, lock

BLOCKED = (
    "model._target_=faulty_models.FailingModel",
    "trusted_targets=[faulty_models]",
    "~model.hidden",
    "+model.how=block",
    "launch.world_size=2",
    "hydra.run.dir=run",
)


def test_train_refuses_the_folder_of_a_running_run_until_that_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with running(tmp_path, *BLOCKED, f"+model.pipe={pipe}") as first, pipe.open("wb"):  # opens when the first trains
        second = train(tmp_path, "hydra.run.dir=run")
        assert second.status == 2
        (line,) = second.stderr.splitlines()
        pid = first.process.pid
        assert line.startswith(f"error: {tmp_path / 'run'} is in use by the run with process id {pid} on ")

        os.kill(pid, signal.SIGKILL)
        first.process.wait(TIMEOUT_S)
        with lock(tmp_path / "run"):  # nobody else is in it
            pass
        third = train(tmp_path, "hydra.run.dir=run")
        assert third.status == 2
        assert f"already holds a run ({CONFIG_FILE})" in third.stderr
