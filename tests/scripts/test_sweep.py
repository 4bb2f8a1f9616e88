"""scripts/sweep.py from start to end, under joblib's launcher and under submitit's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from repository import REPOSITORY
from running import sweep

from gossip.lab.sweeps import sweeper

TINY = ("experiment=smoke", "launch.world_size=3", "seed=0", "training.steps=10", "topology=ring", "compression=none")


@pytest.mark.slow
def test_sweep_smoke_runs_in_parallel_and_reports(tmp_path: Path) -> None:
    two_by_two = ("topology=ring,hypercube", "optimizer.lr=0.1,-1", "hydra.launcher.n_jobs=2")
    run = sweep(tmp_path, *TINY, *two_by_two, fresh=True)
    assert run.status == 1, run.stderr
    assert run.stderr.count("hypercube on 3 ranks is left out: ") == 1
    folder = tmp_path / "outputs" / "sweeps" / "smoke"
    results = json.loads((folder / "results.json").read_text())
    assert "hypercube on 3 ranks is left out: " in results["description"]
    rows = {(row["label"], row["condition"]): row for row in results["rows"]}
    assert {key: row["status"] for key, row in rows.items()} == {
        (what, f"optimizer.lr={lr}"): status
        for what in ("ring", "all-reduce", "no communication")
        for lr, status in (("0.1", "completed"), ("-1", "failed"))
    }
    (reason,) = rows["ring", "optimizer.lr=-1"]["reasons"]
    assert "Invalid learning rate: -1" in reason
    assert reason in run.stdout
    assert rows["ring", "optimizer.lr=0.1"]["curves"]["step"] == [10]
    assert rows["ring", "optimizer.lr=0.1"]["commands"] == [
        "gossip train topology=ring compression=none launch.world_size=3 seed=0 experiment=smoke "
        "training.steps=10 optimizer.lr=0.1"
    ]
    assert (folder / "report.html").stat().st_size > 10_000
    assert run.left_running == ()


@pytest.mark.slow
def test_sweep_jobs_of_submitit_run(tmp_path: Path) -> None:
    run = sweep(tmp_path, *TINY, "method=ddp", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=2")
    assert run.status == 0, run.stderr
    rows = json.loads((tmp_path / "outputs" / "sweeps" / "smoke" / "results.json").read_text())["rows"]
    assert {row["label"]: row["status"] for row in rows} == {"all-reduce": "completed", "no communication": "completed"}


def test_sweep_composes_for_slurm() -> None:
    sweeper.register()
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        config = compose(
            "sweep", ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=debug"], return_hydra_config=True
        )
    assert config.hydra.launcher._target_.endswith("SlurmLauncher")
    assert config.hydra.launcher.partition == "debug"
