"""scripts/train.py logger=[...]: a run that is killed and goes on, and one whose loggers are not there."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from pathlib import Path

import pytest
from logger_readers import SCALARS, assert_same, by_key
from running import run_folders, running, train

from gossip.lab.experiments.records import read_jsonl
from gossip.lab.experiments.run_folder import read_json
from gossip.lab.loggers.logger import flattened

pytestmark = pytest.mark.slow

STOPS_AT = 12
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
    "logger=tensorboard",
)


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


def test_train_killed_run_goes_on_in_the_same_run_of_its_logger(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    folder = tmp_path / "run"
    blocks = (f"+model.pipe={tmp_path}/pipe", f"+model.once={tmp_path}/stopped")
    with running(tmp_path, *RUN, *blocks) as run:
        while read_json(folder / "loggers" / "tensorboard_mean.json").get("next_step") != STOPS_AT:
            assert run.process.poll() is None, run.finished()
            time.sleep(0.05)
    run = train(tmp_path, "resume=run", TRUSTED)
    assert run.status == 0, run.stderr
    assert "step 10 is restored from" in run.stderr
    assert " WARNING " not in run.stderr

    expected = means(folder)
    assert list(expected) == list(range(len(expected)))
    assert len(expected) > STOPS_AT
    assert_same(SCALARS["tensorboard"](folder, "mean"), by_key(expected))
    assert not (folder / "loggers" / "begun.json").exists()
    assert run.left_running == ()


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
