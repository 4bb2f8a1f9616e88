"""What scripts/train.py says and leaves when a run goes wrong, or shares the folder of another one."""

import os
import signal
import socket
from pathlib import Path

import faulty_models
from running import TIMEOUT_S, running, summary_of, train

from gossip.lab.experiments.run_folder import CONFIG_FILE, lock

FAULTY = (*faulty_models.FAULTY, "training.epochs=1", "launch.world_size=3")
NO_CHECKPOINT = "there is no checkpoint to go on from; checkpoint.every=N saves one every N steps"


def test_train_rank_that_raises_is_shown_with_its_traceback(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTY, "+model.rank=2", "+model.step=3", "+model.how=raise")
    assert run.status == 1
    failure = "rank 2 failed: ArithmeticError: injected at step 3"
    assert run.last_lines(2) == [failure, NO_CHECKPOINT]
    assert run.stderr.count("Traceback") == 1
    assert "in fail" in run.stderr
    assert run.left_running == ()
    summary = summary_of(tmp_path)
    assert (summary["status"], summary["reason"]) == ("failed", failure)


def test_train_under_torchrun_records_the_rank_that_raised(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTY, "+model.rank=1", "+model.how=raise", torchrun=2)
    assert run.status != 0
    assert "rank 1 failed: ArithmeticError: injected at step 3" in run.stderr.splitlines()
    assert summary_of(tmp_path)["reason"] == "rank 1 failed: ArithmeticError: injected at step 3"
    assert run.stderr.splitlines().count(NO_CHECKPOINT) == 1


def test_train_ctrl_c_ends_everything(tmp_path: Path) -> None:
    run = train(tmp_path, *FAULTY, "+model.how=interrupt")
    assert run.status == 130
    assert run.last_lines(2) == ["interrupted", NO_CHECKPOINT]
    assert "Traceback" not in run.stderr
    assert run.left_running == ()
    assert summary_of(tmp_path)["reason"] == "interrupted (Ctrl-C)"


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
    assert line.startswith(f"error: port {port} on 127.0.0.1 is taken; choose another one, or leave it out")


def test_train_refuses_the_folder_of_a_running_run_until_that_is_killed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    blocked = ("+model.how=block", f"+model.pipe={pipe}", "hydra.run.dir=run")
    with running(tmp_path, *FAULTY, *blocked) as first, pipe.open("wb"):  # opens when the first trains
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
