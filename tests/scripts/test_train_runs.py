"""scripts/train.py from start to end: one run, a sweep, under torchrun."""

import csv
import json
from pathlib import Path

import pytest
import torch
from logger_readers import SCALARS, assert_same, by_key
from omegaconf import OmegaConf
from running import run_folders, train
from safetensors.torch import load_model

from gossip.lab.experiments import datasets, models
from gossip.lab.experiments.evaluation import evaluate
from gossip.lab.experiments.records import read_jsonl

TINY = ("training.epochs=2", "launch.world_size=2")


@pytest.mark.slow
def test_train_default_run_leaves_everything(tmp_path: Path) -> None:
    run = train(tmp_path, *TINY, "logger=tensorboard", fresh=True).succeeded()
    (folder,) = run_folders(tmp_path)
    records = {"config.yaml", "overrides.yaml", "versions.json", "rank0.jsonl", "rank1.jsonl", "summary.json"}
    figures = {f"{name}.{kind}" for name in ("training", "consensus", "topology") for kind in ("svg", "png")}
    left = {path.name for path in folder.iterdir()}
    assert left == records | figures | {"model.safetensors", "tensorboard", "loggers"}
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.method, config.topology.name, config.launch.world_size) == ("gossip", "one_peer_exponential", 2)
    assert json.loads((folder / "versions.json").read_text())["torch"] == torch.__version__
    assert list((folder / "tensorboard" / "mean").iterdir())

    summary = json.loads((folder / "summary.json").read_text())
    digits = datasets.digits()
    assert summary["steps"] == 2 * (len(digits.train_targets) // 2 // 16)
    module = models.MLP(digits.input_shape, digits.num_classes, hidden=[128])
    load_model(module, folder / "model.safetensors")
    evaluation = evaluate(module, digits.test_inputs, digits.test_targets)
    assert evaluation.accuracy == summary["averaged_test_accuracy"] > 0.9

    for rank in range(2):
        records = read_jsonl(folder / f"rank{rank}.jsonl")
        assert [record["step"] for record in records] == list(range(summary["steps"]))
        assert (records[0]["epoch"], records[-1]["epoch"]) == (0, 1)
        assert records[-1]["consensus_distance"] == summary["consensus_distance_before"] > 0
        assert sum("averaged_test_accuracy" in record for record in records) == 2
    assert f"{summary['averaged_test_accuracy']:.2%}" in run.stdout
    assert str(folder) in run.stdout
    assert run.left_running == ()


def test_train_sweep_goes_on_after_a_failure(tmp_path: Path) -> None:
    run = train(tmp_path, "-m", "topology=hypercube,ring", "launch.world_size=3", "training.epochs=1", "figures=false")
    assert run.status == 1, run.stderr
    (folder,) = run_folders(tmp_path)
    with (folder / "sweep.csv").open() as file:
        failed, completed = csv.DictReader(file)
    assert (failed["status"], completed["status"]) == ("failed", "completed")
    assert failed["overrides"] == "topology=hypercube launch.world_size=3 training.epochs=1 figures=False"
    assert "power of two" in failed["reason"]
    assert "power of two" in run.stdout
    assert float(completed["averaged_test_accuracy"]) > 0.8
    assert float(completed["bytes_sent_per_step"]) > 0
    assert json.loads((folder / "0" / "summary.json").read_text())["status"] == "failed"
    assert (folder / "1" / "model.safetensors").exists()


def test_train_under_torchrun_shares_one_folder(tmp_path: Path) -> None:
    run = train(tmp_path, "training.epochs=1", "topology=ring", "logger=tensorboard", torchrun=2).succeeded()
    (folder,) = run_folders(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["world_size"]) == ("completed", 2)
    assert {"rank0.jsonl", "rank1.jsonl", "model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert run.stdout.count("global average") == 1 + 1  # of one table: its accuracy and its loss
    by_rank = [read_jsonl(folder / f"rank{rank}.jsonl") for rank in range(2)]
    losses = {
        first["step"]: {"loss": (first["loss"] + second["loss"]) / 2} for first, second in zip(*by_rank, strict=True)
    }
    assert_same({"loss": SCALARS["tensorboard"](folder)["loss"]}, by_key(losses))


def test_train_under_torchrun_refuses_a_sweep(tmp_path: Path) -> None:
    run = train(tmp_path, "-m", "topology=ring,complete", torchrun=2)
    assert run.status != 0
    (error,) = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    said = "sweep (-m) cannot run in one of 2 ranks, but this process is one, because RANK=0 and WORLD_SIZE=2"
    assert said in error
