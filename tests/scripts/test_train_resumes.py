"""scripts/train.py resume=...: what is stopped by any means goes on, groups of ranks too."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from faulty_models import FAULTY, TRUSTED
from running import TIMEOUT_S, Finished, left_in, run_folders, running, train

from gossip.checkpoints.checkpoint_folder import check_sizes, read_manifest
from gossip.lab.experiments.records import read_jsonl

STOPS_AT = 12
RUN = (
    *FAULTY,
    f"+model.step={STOPS_AT}",
    "+model.dropout=0.2",
    "training.epochs=1",
    "training.batch_size=30",
    "launch.world_size=2",
    "checkpoint.every=5",
    "figures=false",
)

Left = dict[str, Any]


def result(folder: Path) -> Left:
    return left_in(folder, ("loss", "accuracy", "learning_rate", "averaged_test_loss", "consensus_distance"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The result of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder, *RUN, "model.step=-1", "hydra.run.dir=run").status == 0
    return result(folder / "run")


def stopped(folder: Path, how: str, *overrides: str) -> Finished:
    """Stop a run in ``folder``/run at a step."""
    options = (f"+model.how={how}", f"+model.once={folder}/stopped", "hydra.run.dir=run")
    run = train(folder, *RUN, *options, *overrides)
    assert (folder / "stopped").exists()
    assert len(list((folder / "run" / "checkpoints").iterdir())) == 2
    return run


def newest_step(folder: Path) -> int:
    return max(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())


def test_train_terminated_run_saves_first_and_goes_on_under_torchrun(tmp_path: Path, whole: Left) -> None:
    run = stopped(tmp_path, "terminate")
    assert run.status == 143, run.stderr
    step = newest_step(tmp_path / "run")
    assert step > STOPS_AT, run.stderr
    assert run.last_line == f"go on from step {step} with resume=run {TRUSTED}"
    run = train(tmp_path, "resume=run", TRUSTED, torchrun=2).succeeded()
    assert result(tmp_path / "run") == whole


@pytest.mark.slow
def test_train_whose_ranks_go_on_without_lost_ones_saves_when_all_are_terminated(tmp_path: Path, whole: Left) -> None:
    run = stopped(tmp_path, "terminate", "wrapper.on_peer_loss=continue")
    assert run.status == 143, run.stderr
    step = newest_step(tmp_path / "run")
    assert run.last_line == f"go on from step {step} with resume=run {TRUSTED}"
    assert "all ranks end together" in run.stderr
    assert train(tmp_path, "resume=run", TRUSTED).status == 0
    assert result(tmp_path / "run") | {"summary": whole["summary"]} == whole


def test_train_of_which_all_processes_get_usr1_saves_first(tmp_path: Path) -> None:
    long = ("training.epochs=2000", "training.evaluate_every_epochs=0", "checkpoint.every=1000000")
    with running(tmp_path, *long, "launch.world_size=2", "hydra.run.dir=run") as run:
        records = [tmp_path / "run" / f"rank{rank}.jsonl" for rank in range(2)]  # both ranks listen for signals by then
        while not all(file.exists() and file.read_bytes() for file in records):
            assert run.process.poll() is None, run.finished()
            time.sleep(0.05)
        os.killpg(run.process.pid, signal.SIGUSR1)
        ended = run.finished()
    assert ended.status == 128 + signal.SIGUSR1, ended.stderr
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    manifest = read_manifest(checkpoint)
    check_sizes(checkpoint, manifest)
    assert ended.last_line == f"go on from step {manifest['step']} with resume=run"
    steps = [len(read_jsonl(tmp_path / "run" / f"rank{rank}.jsonl")) for rank in range(2)]
    assert steps == [manifest["step"]] * 2


@pytest.mark.slow
def test_train_resume_auto_goes_on_with_the_newest_run_of_this_configuration(tmp_path: Path, whole: Left) -> None:
    stops = ("+model.how=terminate", f"+model.once={tmp_path}/stopped")
    assert train(tmp_path, *RUN, *stops, "resume=auto").status == 143  # there is none: it begins
    run = train(tmp_path, *RUN, *stops, "resume=auto", "checkpoint.every=6").succeeded()
    assert " is restored from " in run.stderr
    (folder,) = run_folders(tmp_path)
    assert result(folder) == whole
    ended = train(tmp_path, *RUN, *stops, "resume=auto")
    assert (ended.status, run_folders(tmp_path)) == (0, [folder])
    assert "has ended: there is nothing left to do" in ended.stderr


GROUPS = ("launch.world_size=4", "launch.local_size=2", "topology=ring", "training.epochs=1", "figures=false")


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("shard", ["optimizer", "fsdp"])
def test_a_run_of_groups_that_was_killed_ends_with_the_same_model(shard: str, tmp_path: Path) -> None:
    run = (*GROUPS, *FAULTY, "+model.step=8", "checkpoint.every=5", f"shard={shard}")
    whole = train(tmp_path, *run, "model.step=-1", "hydra.run.dir=whole").succeeded()
    assert f"4 ranks in groups of 2 (shard={shard})" in whole.stdout
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["world_size"], summary["local_size"], summary["shard"]) == (4, 2, shard)

    once = f"+model.once={tmp_path}/stopped"
    killed = train(tmp_path, *run, "+model.how=kill_all", once, "hydra.run.dir=part")
    assert killed.status == -signal.SIGKILL
    train(tmp_path, "resume=part", TRUSTED, once).succeeded()
    models = [safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part")]
    assert models[0].keys() == models[1].keys()
    for name, values in models[0].items():
        assert torch.equal(values, models[1][name]), name
