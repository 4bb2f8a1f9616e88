"""scripts/train.py launch.local_size=...: groups of ranks train one replica each."""

import json
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from faulty_models import FAULTY, TRUSTED
from running import TIMEOUT_S, train

RUN = ("launch.world_size=4", "launch.local_size=2", "topology=ring", "training.epochs=1", "figures=false")


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("shard", ["optimizer", "fsdp"])
def test_a_run_of_groups_that_was_killed_ends_with_the_same_model(shard: str, tmp_path: Path) -> None:
    run = (*RUN, *FAULTY, "+model.step=8", "checkpoint.every=5", f"shard={shard}")
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
