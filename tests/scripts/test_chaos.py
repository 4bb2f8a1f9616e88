"""Training goes on under random faults, and what would be wrong is seen."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_simulator.fault_schedules import FaultSchedule, Simulation
from running import SCRIPTS, run_here, running
from torch import nn

from gossip import Recording, VirtualWorkers
from gossip.lab.experiments.datasets import digits
from gossip.lab.experiments.records import read_jsonl
from gossip.lab.faults.chaos_report import after_faults, by_step, examine

pytestmark = pytest.mark.xdist_group("chaos")

Notes = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run."""
    folder = tmp_path_factory.mktemp("chaos") / "run"
    options = ("--seconds", "8", "world_size=5", "--steps-between-faults", "60", "--seed", "3", "--timeout-s", "1")
    options += ("--record", str(folder.parent / "recording"))
    with running(folder.parent, str(folder), *options, script=SCRIPTS / "chaos.py") as script:
        finished = script.finished().succeeded()
    assert finished.left_running == ()
    assert finished.stdout.strip().endswith((folder / "report.md").read_text().strip())
    assert (folder / "course.svg").stat().st_size > 5000
    return folder


@pytest.fixture(scope="module")
def notes(ran: Path) -> Notes:
    return [read_jsonl(path) for path in (ran / "chaos").glob("rank*.jsonl")]


@pytest.mark.slow
def test_nothing_is_torn_and_the_mean_is_moved_by_updates_alone(notes: Notes) -> None:
    report = examine(notes)
    assert sum(fault.count for fault in report.faults.values()) >= 2
    assert report.num_joined >= 1
    assert report.num_messages_mixed > 100
    assert report.num_messages_torn == 0
    assert report.num_steps_compared > 50
    assert report.drift_of_the_mean < 1e-11
    assert len(report.accuracies) == 1
    assert report.accuracies[0] > 0.8


@pytest.mark.slow
def test_virtual_workers_repeat_it(ran: Path, notes: Notes) -> None:
    data, recording = digits(), Recording.load(ran.parent / "recording")
    sums, batches = dict[tuple[int, int], float](), dict[tuple[int, int], np.ndarray]()
    for of_place in notes:
        rank, step, random = -1, 0, np.random.default_rng()
        for note in [*of_place, {"member": 0, "begins": {"step": 0}}]:
            if {"begins", "comes back", "trained"} & note.keys():  # it was lost within a step, or has made it
                batches[rank, step] = random.integers(0, len(data.train_inputs), 16)
            if "begins" in note:
                random = np.random.default_rng((3, note["member"], 1))
            rank, step = note["member"], step + ("trained" in note)
            step = next((note[what]["step"] for what in ("begins", "members") if what in note), step)
            if "trained" in note:
                sums[rank, step - 1] = note["trained"]["sum"]
    torch.manual_seed(3)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    size = len(recording.num_steps)
    options: Any = {"topology": "one_peer_exponential", "bucket_cap_mb": 2**-5, "replay": recording}
    workers = VirtualWorkers(module, size, lambda held: torch.optim.SGD(held, lr=0.1), **options)
    for step in range(max(recording.num_steps)):
        chosen = np.concatenate([batches.get((rank, step), np.arange(16)) for rank in range(size)])
        for rank in [rank for rank in range(size) if (rank, step) in sums]:
            found = sum(float(stack[rank].detach().sum()) for stack in workers.parameters())
            assert found == pytest.approx(sums.pop((rank, step)), abs=1e-11)
        outputs = workers(data.train_inputs[chosen].double())
        nn.functional.cross_entropy(outputs, data.train_targets[chosen]).backward()
    assert not sums


@pytest.mark.slow
def test_what_would_be_wrong_is_seen(notes: Notes) -> None:
    notes = copy.deepcopy(notes)
    mixed = next(note["mixed"] for by_rank in notes for note in by_rank if "mixed" in note)
    mixed[-1] = mixed[-1][::-1]
    steps = [note["trained"] for by_rank in notes for note in by_rank if "trained" in note]
    for made in steps:  # whichever steps are compared
        made["sum"] += made["step"] % 2 * 1e-3 / len(made["members"])
    found = examine(notes)
    assert found.num_messages_torn == 1
    assert found.drift_of_the_mean == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.slow
def test_the_simulation_repeats_it(ran: Path, notes: Notes) -> None:
    faults = [note for of_place in notes for note in of_place if "fault" in note]
    recorded = min(faults, key=lambda note: note["at"])
    simulation = Simulation(FaultSchedule.recorded(ran)).run()
    first, *others = simulation.applied
    assert (first.kind, first.process) == (recorded["fault"]["kind"], recorded["member"])
    assert others
    assert "ended" in simulation.outcomes.values()


@pytest.mark.slow
def test_a_shard_group_that_loses_a_rank_is_gone_as_a_whole_and_comes_back(tmp_path: Path) -> None:
    plan = ("--seconds", "15", "world_size=6", "--local-size", "2", "--shard", "optimizer", "--faults", "kill:3@5")
    run_here("chaos.py", tmp_path / "run", *plan).succeeded()
    report = examine([read_jsonl(path) for path in sorted((tmp_path / "run/chaos").glob("rank*.jsonl"))], 2)
    assert report.members_at_the_end == [0, 1, 4, 5, 6, 7]
    assert report.faults["kill"].back_s is not None
    assert report.num_messages_torn == 0
    assert report.num_steps_compared > 20
    assert report.drift_of_the_mean < 1e-11
    assert len(report.accuracies) == 1
    simulation = Simulation(FaultSchedule.recorded(tmp_path / "run")).run()
    assert [fault.kind for fault in simulation.applied] == ["kill"]
    assert [simulation.outcomes[mate] for mate in (2, 3)] == ["error", "killed"]


def test_what_followed_a_fault_is_of_the_others_and_of_the_whole_group() -> None:
    def trained(member: int, at: float, step: int, took_s: float) -> dict[str, Any]:
        return {"member": member, "at": at, "trained": {"step": step, "took_s": took_s}}

    def fault(member: int, at: float, kind: str, duration_s: float | None = None) -> dict[str, Any]:
        ranks = [0, 1, 2, 3, 4, 5]
        return {
            "member": member,
            "at": at,
            "fault": {"kind": kind, "duration_s": duration_s, "in_step": 1, "members": ranks},
        }

    without = {"member": 4, "at": 3.0, "members": {"step": 2, "members": [0, 1, 4, 5]}}
    notes = [
        [trained(0, 1.0, 0, 9.0), fault(0, 1.5, "freeze", 0.5), trained(0, 3.5, 1, 0.25), trained(0, 9.0, 9, 7.0)],
        [trained(2, 1.0, 0, 0.1), fault(2, 1.75, "freeze", 3.0), trained(6, 8.0, 6, 0.1)],
        [trained(3, 1.0, 0, 0.1), fault(3, 2.0, "kill"), trained(3, 2.0, 1, 5.0), trained(7, 7.0, 5, 0.1)],
        [without, trained(4, 4.0, 4, 0.5)],
    ]
    found = after_faults(notes, 2)
    assert [found[name].count for name in ("freeze (up to 1 s)", "freeze (over 1 s)", "kill")] == [1, 1, 1]
    kill = found["kill"]
    assert [spread and spread.median for spread in (kill.step_s, kill.without_s, kill.back_s)] == [0.5, 1.0, 5.0]
    # The freeze of the other rank of its group was not what ended it.
    assert found["freeze (over 1 s)"].without_s is None
    assert found["freeze (up to 1 s)"].without_s is None


@pytest.mark.slow
def test_bad_arguments_are_refused_in_one_line(tmp_path: Path) -> None:
    for arguments, words in (
        ((tmp_path,), "is there already; name a new folder"),
        ((tmp_path / "new", "--faults", "kill:1"), "faults[0] must match pattern '^(kill|freeze"),
        ((tmp_path / "new", "world_size=4", "--local-size", "2", "--record", "R"), "record=R is of single ranks"),
    ):
        refused = run_here("chaos.py", *arguments)
        assert refused.status == 2
        assert words in refused.last_line


def test_a_step_stands_where_its_first_rank_had_made_it() -> None:
    made = [(0, 1.0, 0.5), (0, 9.0, 8.0), (1, 2.0, 0.5), (1, 2.5, 0.6)]  # one rank was frozen in step 0
    notes = [{"at": at, "trained": {"step": step, "took_s": took, "loss": at}} for step, at, took in made]
    assert by_step([{"begins": {}}, *notes]).tolist() == [[1.0, 2.0], [8.0, 0.6], [5.0, 2.25]]
