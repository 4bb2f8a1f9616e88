"""scripts/sweep.py from start to end, under joblib's launcher; submitit's is composed."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from repository import REPOSITORY
from running import run

from gossip.lab.sweeps import sweeper

TINY = ("experiment=smoke", "launch.world_size=3", "seed=0", "training.steps=10", "topology=ring", "compression=none")


@pytest.mark.slow
def test_sweep_smoke_runs_in_parallel_and_reports(tmp_path: Path) -> None:
    done = run(
        "sweep.py", tmp_path, *TINY, "topology=ring,hypercube", "hydra.launcher.n_jobs=2", fresh=True
    ).succeeded()
    assert done.stderr.count("hypercube on 3 ranks is left out: ") == 1
    folder = tmp_path / "outputs" / "sweeps" / "smoke"
    results = json.loads((folder / "results.json").read_text())
    assert "hypercube on 3 ranks is left out: " in results["description"]
    rows = {row["label"]: row for row in results["rows"]}
    assert {label: row["status"] for label, row in rows.items()} == dict.fromkeys(
        ("ring", "all-reduce", "no communication"), "completed"
    )
    assert rows["ring"]["curves"]["step"] == [10]
    assert rows["ring"]["commands"] == [
        "gossip train topology=ring compression=none launch.world_size=3 seed=0 experiment=smoke training.steps=10"
    ]
    assert (folder / "report.html").stat().st_size > 10_000
    assert done.left_running == ()


def test_sweep_composes_for_slurm() -> None:
    sweeper.register()
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        config = compose(
            "sweep", ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=debug"], return_hydra_config=True
        )
    assert config.hydra.launcher._target_.endswith("SlurmLauncher")
    assert config.hydra.launcher.partition == "debug"
