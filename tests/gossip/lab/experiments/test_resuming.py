"""Runs that were stopped and go on: bit for bit what they would have been, or with another number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from composing import composed, continued
from faulty_models import FAULTY
from running import left_in

from gossip.errors import LaunchError
from gossip.lab.experiments.job import run_job
from gossip.lab.experiments.records import read_jsonl
from gossip.lab.experiments.resuming import State, continued_configuration, state_of
from gossip.lab.experiments.run_folder import OVERRIDES_FILE, claim, read_overrides

pytestmark = pytest.mark.slow

FAILS_AT = 11
LAST_CHECKPOINT = 10
SMALL = (
    *FAULTY,
    f"+model.step={FAILS_AT}",
    "+model.dropout=0.2",
    "training.epochs=2",
    "training.batch_size=60",
    "training.consensus_every_steps=3",
    "launch.world_size=3",
    "checkpoint.every=5",
    "figures=false",
)
STEPS_PER_EPOCH = 7


def interrupted(folder: Path, *overrides: str) -> dict[str, Any]:
    """Train until the model fails; the configuration that goes on in ``folder``."""
    config = composed(*SMALL, *overrides, f"+model.once={folder}.failed")
    with pytest.raises(LaunchError, match="injected at step "):
        run_job(config, folder, ["first=1"])
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    return {**config, "resume": str(folder)}


@pytest.mark.parametrize(
    "options",
    [
        ("method=gossip", "figures=true"),
        (
            "algorithm=adapt_then_combine",
            "wrapper.clip_grad_norm=1",
            "wrapper.step_in_backward=false",
            "optimizer=adamw",
        ),
    ],
)
def test_resumed_run_is_bit_identical(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "whole.failed").touch()  # it will not
    overrides = (*options, "wrapper.bucket_cap_mb=0.001")
    whole = run_job(composed(*SMALL, *overrides, f"+model.once={tmp_path}/whole.failed"), tmp_path / "whole")
    config = interrupted(tmp_path / "run", *overrides)
    steps = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(steps) == ["step_0000000005", f"step_{LAST_CHECKPOINT:010}"]

    resumed = run_job(config, tmp_path / "run", ["second=2"])
    assert left_in(tmp_path / "run") == left_in(tmp_path / "whole")
    assert len(left_in(tmp_path / "run")["records"]["rank2.jsonl"]) == whole["steps"] == 2 * STEPS_PER_EPOCH
    assert resumed["overrides"] == ["first=1", "second=2"]
    assert resumed["wall_time_s"] > resumed["training_time_s"] > 0
    if "figures=true" in options:
        assert (tmp_path / "run" / "training.svg").read_bytes() == (tmp_path / "whole" / "training.svg").read_bytes()
    assert not list((tmp_path / "run").glob("*.lock"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_resumed_run_takes_another_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    folder = tmp_path / "run"
    config = interrupted(folder)
    config["launch"] = {**config["launch"], "world_size": world_size}
    summary = run_job(config, folder)
    steps_per_epoch = 1437 // world_size // 60
    done = (LAST_CHECKPOINT - STEPS_PER_EPOCH) * steps_per_epoch // STEPS_PER_EPOCH  # of the second epoch
    total = LAST_CHECKPOINT + steps_per_epoch - done
    assert (summary["steps"], summary["world_size"]) == (total, world_size)
    for rank in range(max(3, world_size)):
        steps = [record["step"] for record in read_jsonl(folder / f"rank{rank}.jsonl")]
        first, last = LAST_CHECKPOINT if rank >= 3 else 0, total if rank < world_size else LAST_CHECKPOINT
        assert steps == list(range(first, last))
    # The learning rate is where the schedule of a run of so many ranks has it at that place of the data.
    other = composed(*SMALL, f"launch.world_size={world_size}", "model.step=-1", "training.consensus_every_steps=0")
    run_job(other, tmp_path / "other")
    rates = [record["learning_rate"] for record in read_jsonl(tmp_path / "other" / "rank0.jsonl")]
    resumed_rates = [record["learning_rate"] for record in read_jsonl(folder / "rank0.jsonl")]
    assert resumed_rates[LAST_CHECKPOINT:] == rates[steps_per_epoch + done :]
    assert summary["averaged_test_accuracy"] > 0.6
    assert continued_configuration(folder, {"resume": "x"}, {}, [])["launch"]["world_size"] == world_size


def test_resumed_run_of_given_steps_is_as_long_on_other_ranks(tmp_path: Path) -> None:
    config = interrupted(tmp_path / "run", "training.steps=17")
    config["launch"] = {**config["launch"], "world_size": 2}
    summary = run_job(config, tmp_path / "run")
    assert (summary["steps"], summary["world_size"]) == (17, 2)
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "rank0.jsonl")] == list(range(17))


def test_run_without_a_checkpoint_begins_again_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, "checkpoint.every=0", "training.epochs=1", "model.step=3")
    assert state_of(folder) is State.BEGIN_AGAIN
    config = composed(*SMALL, "training.epochs=1", "checkpoint.every=0", "model.step=-1")
    assert run_job(config, folder, again=True)["steps"] == STEPS_PER_EPOCH
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    assert [record["step"] for record in read_jsonl(folder / "rank1.jsonl")] == list(range(STEPS_PER_EPOCH))
    assert state_of(folder) is State.ENDED


def test_run_goes_on_when_a_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoints").write_text("no folder")
    assert run_job(composed(*SMALL, "model.step=-1", "training.epochs=1"), folder)["status"] == "completed"
    assert (folder / "checkpoints").read_text() == "no folder"


def test_resumed_configuration_is_the_folders(tmp_path: Path) -> None:
    given = ("topology=ring", "experiment=digits_cnn", "seed=5", "launch.world_size=8", "optimizer.lr=0.2")
    claim(tmp_path, composed(*given), given)
    assert read_overrides(tmp_path) == list(given)
    (tmp_path / OVERRIDES_FILE).unlink()
    assert read_overrides(tmp_path) == []
    same = composed(*given, f"resume={tmp_path}")
    assert continued(tmp_path) == continued(tmp_path, *given) == same
    may_change = ("launch.world_size=2", "checkpoint.every=7", "checkpoint.keep=1", "profile=true")
    changed = continued(tmp_path, "seed=5", *may_change)
    assert changed["launch"] == {**same["launch"], "world_size": 2}
    assert changed["checkpoint"] == {**same["checkpoint"], "every": 7, "keep": 1}
    assert changed["profile"] is True
    left_out = dict.fromkeys(("launch", "checkpoint", "profile"))
    assert changed | left_out == same | left_out
