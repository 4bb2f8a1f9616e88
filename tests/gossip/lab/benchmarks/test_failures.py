"""Goodput under faults: the faults, what counts, what is not measured twice, and ranks that are really killed."""

import contextlib
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import ValidationError

from gossip.lab.benchmarks import failures, failures_worker, harness
from gossip.lab.benchmarks.failures import Failures, FailuresSettings, Fault, Run
from gossip.lab.experiments.records import JsonlWriter, read_jsonl
from gossip.lab.experiments.validated_models import ConfigurationError

SETTINGS: dict[str, Any] = {"world_size": 2, "methods": ["gossip_warm"], "every_s": [10.0], "seconds": 40.0}


def settings(**changes: Any) -> FailuresSettings:
    return FailuresSettings.model_validate(SETTINGS | changes, strict=False)


def test_faults_follow_from_the_seed_and_a_run_without_comes_first() -> None:
    names, cases = zip(*settings(methods=["ddp", "gossip_cold"], kinds=["mixture"], seeds=[0, 1]).cases(), strict=True)
    of_kind = "loopback/ddp/mixture_every_10_s"
    assert names[:3] == ("loopback/ddp/none_every_40_s/seed_0", f"{of_kind}/seed_0", f"{of_kind}/seed_1")
    assert cases[0].faults() == []
    assert cases[1].faults() == cases[4].faults() != cases[2].faults()
    times = [0.0, *(fault.at for fault in cases[1].faults())]
    assert all(5 <= later - earlier <= 15 for earlier, later in itertools.pairwise(times))


def test_a_rank_that_is_still_struck_is_not_struck_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, now = settings(kinds=["slow"], every_s=[5.0], seconds=200.0), [100.0]
    run = failures._Supervised(case, tmp_path)
    monkeypatch.setattr(failures, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(run, "_look", lambda: now.append(now.pop() + 0.25))
    monkeypatch.setattr(run, "_pid_of", lambda _: 1)
    struck = run._train(now[0])
    assert len(struck) < len(case.faults())
    for slot in range(case.world_size):
        times = [at for at, fault in struck if fault.slot == slot]
        assert len(times) > 3
        assert all(later - earlier >= 20 for earlier, later in itertools.pairwise(times))


def test_links_are_cut_in_the_lab() -> None:
    """There, too, ranks are programs of their own."""
    of_lab = settings(network="lab", methods=["gossip_warm", "ddp"], kinds=["mixture"], seconds=4000.0)
    names, cases = zip(*of_lab.cases(), strict=True)
    assert names == ("200mbit/ddp/none_every_4000_s/seed_0", "200mbit/ddp/mixture_every_10_s/seed_0")
    assert {fault.kind for fault in cases[1].faults()} == {"kill", "freeze", "slow", "cut"}
    assert {fault.kind for fault in settings(kinds=["mixture"], seconds=4000.0).faults()} == {"kill", "freeze", "slow"}
    with pytest.raises(ValidationError, match="cut in the lab only"):
        settings(kinds=["cut"])


def test_what_counts(tmp_path: Path) -> None:
    """A step that is made again counts once; what a killed rank of gossip has not sent does not."""
    struck = [(120.0, Fault(20.0, "kill", 0)), (110.0, Fault(10.0, "freeze", 1)), (130.0, Fault(30.0, "slow", 1))]
    found = []
    for method in ("ddp", "gossip_warm"):
        run = failures._Supervised(settings(methods=[method]), tmp_path)
        run._begun = {0: [(0.0, 10), (121.0, 12)], 1: [(0.0, 11)]}
        steps_of: dict[tuple[int, int], Iterable[int]] = {(0, 10): range(1, 20), (0, 12): range(18, 22)}
        steps_of[1, 11] = [*range(1, 21), *range(24, 40)]
        run._notes = [
            failures._Note((105.5 if pid == 12 else 100.5) + step, slot, pid, step, 1)
            for (slot, pid), steps in steps_of.items()
            for step in steps
        ]
        run._notes.append(failures._Note(99.0, 0, 10, 0, 1))  # before the clock
        losses = {110.5: 2.5, 115.5: 1.5}
        run._notes = [
            note._replace(loss=losses[note.at] - note.slot) if note.at in losses else note for note in run._notes
        ]
        found.append(run._result(100.0, struck))
    ddp, gossip = found
    assert (ddp.batches, ddp.lost, ddp.num_faults) == (19 + 36 + 2, 2, 3)
    assert (gossip.batches, gossip.lost) == (19 + 36 + 2 - 4, 6)
    assert ddp.goodput == 57 / 40 / 2
    assert (ddp.started_s, ddp.back_s) == ([1.0], [3.5])
    assert ddp.bound == 1 - (3.5 + 5 + 0.75 * 10) / 80  # the slow one's 20 s are cut short by the end
    assert gossip.others_s[:2] == [4.0, 1.0]
    assert run._others_s(119.0, 1, 140.0) == 4.0  # the other one has been started again
    assert ddp.loss_s == 15.5


def test_goodput_is_relative_to_the_run_without_faults(tmp_path: Path) -> None:
    common: dict[str, Any] = {"method": "ddp", "link": None, "seed": 0, "batches": 9, "lost": 6, "loss_s": 31.4}
    common |= {"others_s": [0.5], "started_s": [1.0], "back_s": [2.0]}
    without = Run(kind="none", every_s=40.0, num_faults=0, goodput=2.0, bound=1.0, **common)
    common |= {"kind": "kill", "num_faults": 3}
    runs = [without, *(Run(every_s=10.0, goodput=each, bound=0.9, **common) for each in (1.0, 1.5))]
    text = "\n".join(Failures().sections(runs))
    assert "| ddp | kill | 10 | 6 | 0.625 (0.500 to 0.750) | 0.900 | 2.0 | 0.50 | 1.00 | 2.00 | 31 |" in text
    Failures().draw(settings(methods=["ddp"]), runs, tmp_path)
    assert "faults per minute" in (tmp_path / "failures.svg").read_text()


@pytest.mark.parametrize(
    ("synchronised", "most", "expected"),
    [
        ([0, 0, 1, 1, 1, 1, 1, 1, 2], 3, [(3, 3), (6, 3)]),  # a synchronisation that fails costs its steps
        ([0, 0, 0, 1, 1, 4, 5], math.inf, [(3, 4), (12, 0), (15, 1)]),  # so does the state of another rank
    ],
)
def test_local_steps_count_once_they_are_synchronised(
    synchronised: list[int], most: float, expected: list[tuple[int, int]]
) -> None:
    module, notes = torch.nn.Linear(2, 2), list[tuple[int, int]]()
    batch = torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)
    paced = mock.Mock(module=module, batches=itertools.repeat(batch), case={"period": 3})
    paced.note = lambda step, count: notes.append((step, count))
    counts = iter(synchronised)
    with pytest.raises(StopIteration):
        failures_worker._train_locally(paced, torch.optim.SGD(module.parameters(), 0.1), lambda: next(counts), most)
    assert notes == expected


@pytest.mark.parametrize("method", ["hivemind", "torchft_diloco"])
def test_a_rival_that_is_not_installed_is_named(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=rf"{method} needs {method[:7]}\w*; install the extra"):
        failures._Supervised(settings(methods=[method]), tmp_path)._meeting_place(contextlib.ExitStack())


def test_records_of_other_settings_are_not_those_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(_: Any, __: Any, case: FailuresSettings, *others: Any, **___: Any) -> None:
        run = dict.fromkeys(("num_faults", "batches", "lost", "goodput", "bound"), 1) | {"loss_s": None, "link": None}
        run |= {"method": "ddp", "kind": "none", "every_s": case.seconds, "seed": 0}
        with JsonlWriter(others[-1] / "rank0.jsonl") as writer:
            writer.write(run | {"others_s": [], "started_s": [], "back_s": []})

    monkeypatch.setattr(harness, "launch", launched)
    for step_s in (0.1, 0.2):
        harness.run(Failures, settings(methods=["ddp"], step_s=step_s), tmp_path)
    folder = next(tmp_path.glob("loopback/ddp/none*/seed_0"))
    assert len(read_jsonl(folder / "rank0.jsonl")) == 1


def test_a_rank_ends_with_the_process_that_started_it() -> None:
    program = (
        "import subprocess, time; from gossip.lab.benchmarks.failures_worker import end_with_parent as end;"
        "print(subprocess.Popen(['sleep', '600'], preexec_fn=end).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())  # type: ignore[union-attr]
        assert failures._is_there(child)
        parent.kill()
    while failures._is_there(child):
        time.sleep(0.01)


@pytest.mark.slow
def test_ranks_are_killed_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(seconds=6.0, every_s=[3.0], step_s=0.2)
    (_, killed), _ = harness.run(Failures, given, tmp_path)
    assert killed.num_faults >= 1
    assert 0 < killed.goodput < 1.2 / 0.2
    monkeypatch.setattr(harness, "run_workers", pytest.fail)
    (_, again), _ = harness.run(Failures, given, tmp_path)
    assert again == killed
