"""scripts/train.py logger=[...]: what the loggers have of whole runs, by the readers of their own libraries."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from pathlib import Path

import pytest
from logger_readers import SCALARS, assert_same, by_key, mlflow_run, wandb_id
from running import run_folders, running, train

from gossip.lab.experiments.records import read_jsonl
from gossip.lab.loggers.logger import flattened

pytestmark = pytest.mark.slow

STOPS_AT = 12
ALL = "logger=[jsonl,tensorboard,wandb,mlflow]"
FOLLOWERS = ("tensorboard", "wandb", "mlflow")
TRUSTED = "trusted_targets=[faulty_models]"
RUN = (
    "model._target_=faulty_models.FailingModel",
    TRUSTED,
    "~model.hidden",
    f"+model.step={STOPS_AT}",
    "+model.how=block",
    "training.epochs=1",
    "training.batch_size=30",
    "training.evaluate_every_steps=4",
    "launch.world_size=2",
    "checkpoint.every=5",
    "hydra.run.dir=run",
    ALL,
)


def has_step(name: str, folder: Path, step: int) -> bool:
    """Whether a logger, which may not have begun yet, has a record of that step."""
    if name == "wandb":  # whose process keeps the last 32 KiB for itself, and loses them with its life
        return any(folder.glob("wandb/offline-run-*/run-*.wandb"))
    if name == "mlflow" and not (folder / "loggers" / "mlflow_mean.json").exists():
        return False  # a reader of a database that is being made would take part in making it
    try:
        return any(found == step for pairs in SCALARS[name](folder, "mean").values() for found, _ in pairs)
    except Exception:  # of a library whose files are only being made
        return False


def means(folder: Path) -> dict[int, dict[str, float]]:
    """Over both ranks, by step."""
    found: dict[int, dict[str, list[float]]] = {}
    for rank in range(2):
        for record in read_jsonl(folder / f"rank{rank}.jsonl"):
            of_step = found.setdefault(record.pop("step"), {})
            for key, value in flattened(record).items():
                of_step.setdefault(key, []).extend([] if math.isnan(value) else [value])
    return {
        step: {key: statistics.fmean(values) if values else math.nan for key, values in of_step.items()}
        for step, of_step in found.items()
    }


def test_train_killed_run_goes_on_in_the_same_runs_of_all_loggers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    folder = tmp_path / "run"
    blocks = (f"+model.pipe={tmp_path}/pipe", f"+model.once={tmp_path}/stopped")
    with running(tmp_path, *RUN, *blocks, "logging.model=true") as run:
        for name in FOLLOWERS:
            while not has_step(name, folder, STOPS_AT - 1):
                assert run.process.poll() is None, run.finished()
                time.sleep(0.05)
    ids = wandb_id(folder, "mean"), mlflow_run(folder, "mean")[1].info.run_id
    run = train(tmp_path, "resume=run", TRUSTED)
    assert run.status == 0, run.stderr
    assert "step 10 is restored from" in run.stderr
    assert " WARNING " not in run.stderr

    expected = means(folder)
    assert list(expected) == list(range(len(expected)))
    assert len(expected) > STOPS_AT
    for name in FOLLOWERS:
        made_twice = range(0) if name == "tensorboard" else range(10, STOPS_AT)
        assert_same(SCALARS[name](folder, "mean"), by_key(expected), made_twice=made_twice)
    assert ids == (wandb_id(folder, "mean"), mlflow_run(folder, "mean")[1].info.run_id)
    client, ended = mlflow_run(folder, "mean")
    assert (ended.info.status, ended.info.run_name) == ("FINISHED", "run")
    assert {each.path for each in client.list_artifacts(ids[1])} == {"figures", "model", "summary.json"}
    assert not (folder / "loggers" / "begun.json").exists()
    assert run.left_running == ()


def test_train_under_torchrun_with_a_run_for_each_rank(tmp_path: Path) -> None:
    short = ("training.epochs=1", "training.batch_size=60", "figures=false")
    run = train(tmp_path, *short, ALL, "logging.ranks=each", "logging.name=mine", torchrun=2)
    assert run.status == 0, run.stderr
    (folder,) = run_folders(tmp_path)
    for rank in range(2):
        records = {record.pop("step"): record for record in read_jsonl(folder / f"rank{rank}.jsonl")}
        for name in SCALARS:
            assert_same(SCALARS[name](folder, f"rank{rank}"), by_key(records))
        assert mlflow_run(folder, f"rank{rank}")[1].info.run_name == f"mine rank {rank}"


def test_train_without_its_loggers_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody is there
    away = ("logger=[wandb,mlflow]", "logger.wandb.mode=online", "logger.mlflow.tracking_uri=http://127.0.0.1:9")
    run = train(tmp_path, "training.epochs=1", "launch.world_size=2", "figures=false", "logging.wait_s=0.5", *away)
    assert run.status == 0, run.stderr
    (folder,) = run_folders(tmp_path)
    assert len(read_jsonl(folder / "rank0.jsonl")) == json.loads((folder / "summary.json").read_text())["steps"]
    warnings = sorted(line.split(" WARNING ")[1] for line in run.stderr.splitlines() if " WARNING " in line)
    assert [line.split()[0] for line in warnings] == ["logger=mlflow", "logger=wandb"]
    assert all("training is not affected, and its records are in" in line for line in warnings)
