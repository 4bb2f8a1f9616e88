"""Configured runs whose ranks go on without those that are lost, and take them back."""

from pathlib import Path

import pytest
from faulty_models import FAULTY
from running import run_folders, summary_of, train
from tiers import rest_is_slow

from gossip.lab.experiments.records import read_jsonl

MORTAL = (*FAULTY, "launch.world_size=3", "launch.timeout_s=60", "wrapper.on_peer_loss=continue", "+model.how=killed")


@pytest.mark.parametrize(
    ("rank", "on_loss", "text"),
    rest_is_slow(
        [
            (0, "redistribute", "data.on_loss=redistribute: all samples are dealt again among them"),
            (1, "hold", "data.on_loss=hold: they divide the 48 samples of each step"),
            (2, "leave", "data.on_loss=leave: 479 of 1437 samples are trained on by nobody"),
        ]
    ),
)
def test_a_run_goes_on_without_a_rank_that_is_killed(tmp_path: Path, rank: int, on_loss: str, text: str) -> None:
    options = (f"+model.rank={rank}", "+model.step=40", f"data.on_loss={on_loss}", "training.epochs=3")
    run = train(tmp_path, *MORTAL, *options).succeeded()
    assert "2 ranks train in the place of 3; " + text in run.stderr
    summary = summary_of(tmp_path)
    left = [other for other in range(3) if other != rank]
    (change,) = summary["changes_of_ranks"]
    assert change["members"] == left
    assert change["step"] >= 40
    assert summary["steps"] == 3 * (1437 // 3 // 16)
    assert summary["averaged_test_accuracy"] > 0.5
    (folder,) = run_folders(tmp_path)
    records = read_jsonl(folder / f"rank{left[0]}.jsonl")
    assert [record["num_ranks"] for record in records] == [
        3 if record["step"] < change["step"] else 2 for record in records
    ]
    if on_loss == "hold":
        others = read_jsonl(folder / f"rank{left[1]}.jsonl")[change["step"] :]
        totals = {
            mine["num_samples"] + each["num_samples"]
            for mine, each in zip(records[change["step"] :], others, strict=True)
        }
        assert totals == {48}
    assert (folder / "model.safetensors").exists()
    assert (folder / "training.svg").exists()
    assert f"ranks from step {change['step']} on" in run.stdout + run.stderr


@pytest.mark.slow
def test_a_rank_that_is_wrong_comes_back_within_its_loop(tmp_path: Path) -> None:
    options = ("+model.rank=1", "+model.step=40", "training.steps=1500", "wrapper.max_difference=clip")
    wrong = [text.replace("killed", "wrong") for text in MORTAL]
    run = train(tmp_path, *wrong, *options, "training.evaluate_every_epochs=0").succeeded()
    assert "do not come back by being mixed" in run.stderr
    summary = summary_of(tmp_path)
    assert [change["members"] for change in summary["changes_of_ranks"]] == [[0, 2], [0, 2, 3]]
    assert summary["averaged_test_accuracy"] > 0.5
    (folder,) = run_folders(tmp_path)
    joined_at, last = summary["changes_of_ranks"][-1]["step"], summary["steps"] - 1
    steps = [record["step"] for record in read_jsonl(folder / "rank1.jsonl")]
    assert steps[steps.index(joined_at) :] == list(range(joined_at, last + 1))


@pytest.mark.slow
def test_a_rank_that_is_killed_is_started_again_and_joins(tmp_path: Path) -> None:
    once = tmp_path / "once"
    scheduler = ("scheduler._target_=faulty_models.RateOfItsTime", f"+scheduler.once={once}")
    dies = ("+model.rank=1", "+model.step=5", f"+model.once={once}", "training.steps=1500")
    options = (*MORTAL, *dies, *scheduler, "launch.restart=1", "training.evaluate_every_epochs=0")
    run = train(tmp_path, *options).succeeded()
    assert "it is restarted (1 of 1 restarts)" in run.stderr
    summary = summary_of(tmp_path)
    assert [change["members"] for change in summary["changes_of_ranks"]] == [[0, 2], [0, 2, 3]]
    (folder,) = run_folders(tmp_path)
    joined_at = summary["changes_of_ranks"][-1]["step"]
    rates = {
        rank: {record["step"]: record["learning_rate"] for record in read_jsonl(folder / f"rank{rank}.jsonl")}
        for rank in (0, 3)
    }
    assert list(rates[3]) == list(range(joined_at, 1500))
    assert rates[3] == {step: rates[0][step] for step in rates[3]}
    assert len(set(rates[3].values())) > 1


@pytest.mark.slow
def test_a_shard_group_of_which_a_rank_is_killed_is_started_again_and_joins(tmp_path: Path) -> None:
    groups = ("launch.world_size=6", "launch.local_size=2", "shard=optimizer", "launch.restart=1")
    options = ("+model.rank=3", "+model.step=5", f"+model.once={tmp_path / 'once'}", "training.steps=800")
    run = train(tmp_path, *MORTAL, *groups, *options, "training.evaluate_every_epochs=0").succeeded()
    assert "its shard group, ranks 2 to 3, is restarted (1 of 1 restarts)" in run.stderr
    summary = summary_of(tmp_path)
    assert [change["members"] for change in summary["changes_of_ranks"]] == [[0, 1, 4, 5], [0, 1, 4, 5, 6, 7]]
    assert summary["averaged_test_accuracy"] > 0.5
    (folder,) = run_folders(tmp_path)
    joined_at = summary["changes_of_ranks"][-1]["step"]
    for rank in (6, 7):
        assert [record["step"] for record in read_jsonl(folder / f"rank{rank}.jsonl")] == list(range(joined_at, 800))
