"""Time to all-reduce's loss: what is configured, trained, counted and reported."""

import json
import math
from pathlib import Path

import pytest
import torch
from lab_hosts import why_no_hosts
from running import run_here

from gossip import Cluster, Workload
from gossip.lab.benchmarks import time_to_loss
from gossip.lab.benchmarks.benchmark import Place
from gossip.lab.benchmarks.time_to_loss import Curve, LossResult, Point, reaches_or_ends, section, target_of
from gossip.lab.benchmarks.workloads import LOSS_TASKS
from gossip.lab.experiments.records import read_jsonl
from gossip.lab.probe.cluster_measuring import Measured

TINY = ("tasks=[digits_cnn]", "world_size=2", "seeds=[0]", "steps=2", "evaluate_every=1")


def point(step: int, seconds: float, sent_bytes: float, loss: float) -> Point:
    return Point(step=step, seconds=seconds, sent_bytes=sent_bytes, loss=loss)


def curve(method: str, seed: int, seconds: float, *losses: float) -> Curve:
    """Evaluations at equal distances, of 1 MB each."""
    points = [point(10 * i, seconds * i, 1e6 * i, loss) for i, loss in enumerate(losses, start=1)]
    return Curve(method=method, seed=seed, points=points)


CURVES = [
    curve("ddp", 0, 10.0, 3.0, 2.0, 1.0),
    curve("gossip", 0, 1.0, 2.0, 1.005),
    curve("ddp", 1, 10.0, 3.0, 1.0, 1.0),
    curve("gossip", 1, 1.0, 1.02, 0.9),
]


def result_of(curves: list[Curve]) -> LossResult:
    return LossResult(
        task="digits_cnn",
        link="200mbit",
        curves=curves,
        references=["ddp"],
        step_s=1.0,
        probe=Measured(Cluster(2), Workload(0.02, 0.03, (8,)), is_regular=True),
        advice="",
    )


def test_curve_reaches_the_target_at_the_first_evaluation_that_is_as_good() -> None:
    points = CURVES[0].points
    assert target_of(points) == pytest.approx(1.01)
    assert CURVES[1].reached(1.01) == point(20, 2.0, 2e6, 1.005)
    assert CURVES[2].reached(1.01) == point(20, 20.0, 2e6, 1.0)
    assert CURVES[0].reached(0.5) is None
    assert [reaches_or_ends(1.01, 25.0, each) for each in points] == [False, False, True]
    assert reaches_or_ends(1.01, 25.0, point(1, 25.0, 0.0, math.nan))


def test_rows_compare_methods_of_the_same_seed() -> None:
    text = section(result_of(CURVES))[-1]
    assert "| method | reached | seconds | of ddp's | steps | sent, MB |" in text
    assert "| ddp | 2 of 2 | 25.00 (20.00 to 30.00) | 1.000 | 25 (20 to 30) | 2.5 (2.0 to 3.0) |" in text
    assert "| gossip | 2 of 2 | 2.00 | 0.083 (0.067 to 0.100) | 20 | 2.0 |" in text


def test_table_says_what_was_not_reached() -> None:
    text = "\n".join(section(result_of([CURVES[0], curve("gossip", 0, 1.0, 2.0, math.nan)])))
    assert "| ddp | 1 of 1 | 30.00 | 1.000 | 30 | 3.0 |" in text
    assert "| gossip | 0 of 1 | not reached | not reached | not reached | not reached |" in text
    assert "All-reduce's step: 1000 ms; computing alone, on all ranks at once: 50 ms (5%)." in text


def test_figure_has_one_line_and_one_band_per_method(tmp_path: Path) -> None:
    time_to_loss.loss_figure([result_of(CURVES)], tmp_path / "loss.svg")
    drawing = (tmp_path / "loss.svg").read_text()
    assert drawing.count('id="FillBetweenPolyCollection') == 4  # over seconds and over bytes
    for text in ("median and range of 2 seeds", "way to the target loss", "ddp", "gossip"):
        assert f"<!-- {text} -->" in drawing


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stepps=3", "the configuration has no key stepps; did you mean steps?"),
        ("tasks=[digits_cn]", "there is no tasks[0]=digits_cn; did you mean digits_cnn?"),
        ("methods.diloco.algorithm={name: diloko}", "unknown algorithm 'diloko'"),
        ("methods={local: {}}", "methods must begin with all-reduce"),
    ],
)
def test_refusals_are_one_line(override: str, words: str, tmp_path: Path) -> None:
    done = run_here("time_to_loss.py", tmp_path / "new", override)
    assert done.status == 2
    assert words in done.last_line
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.root
def test_methods_train_in_turns_until_they_are_as_good(tmp_path: Path) -> None:
    network = "loopback" if why_no_hosts() else "lab"
    folder = tmp_path / "run"
    methods = "methods={ddp: {}, diloco: {method: gossip, topology: complete, algorithm: {name: diloco, period: 2}}}"
    options = (f"network={network}", "links=[1000mbit]", "max_time_ratio=50", methods)
    done = run_here("time_to_loss.py", folder, *TINY, *options)
    assert done.status == 0, done.stderr
    assert (folder / "report.md").read_text() in done.stdout
    assert "diloco" in (folder / "loss.svg").read_text()
    (result,) = json.loads((folder / "results.json").read_text())["results"]
    assert result["link"] == ("loopback" if network == "loopback" else "1000mbit")
    ddp, diloco, as_probed = result["curves"]
    assert as_probed["method"] == "gossip as probed"
    assert result["advice"].startswith(("Gossip ", "Cannot tell "))
    assert f"The probe: {result['advice']}" in done.stdout
    assert [point["step"] for point in ddp["points"]] == [1, 2]
    target = 1.01 * ddp["points"][-1]["loss"]
    *before, last = diloco["points"]
    assert last["loss"] <= target < min([point["loss"] for point in before], default=math.inf)
    for points in (ddp["points"], diloco["points"]):
        seconds = [point["seconds"] for point in points]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
    if network == "lab":  # two ranks send the whole model once for an average; evaluations are not counted
        assert 1 < ddp["points"][-1]["sent_bytes"] / 2 / 10.08e6 < 1.3
        assert last["sent_bytes"] < (last["step"] // 2 + 0.3) * 1.3 * 10.08e6
    records = [read_jsonl(folder / result["link"] / "digits_cnn" / f"rank{rank}.jsonl")[1:] for rank in range(2)]
    assert records[0] == records[1]


def test_batches_of_a_rank_are_its_part_of_all() -> None:
    task = LOSS_TASKS["digits_cnn"]
    data = task.make_data()
    together = next(task.batches(data, 3, 0, range(3)))
    own = [next(task.batches(data, 3, 0, range(rank, rank + 1))) for rank in range(3)]
    for part in range(2):
        assert torch.cat([batch[part] for batch in own]).equal(together[part])


class Wire:
    """An interface over which messages go until some moment, and a clock that only sleeping moves."""

    def __init__(self, until: float) -> None:
        self.now, self._until = 0.0, until

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def interface_bytes(self, _: str) -> tuple[int, int]:
        return round(1e6 * min(self.now, self._until)), round(20 * self.now)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """Busy for two seconds; signs of life go on."""
    made = Wire(until=2.0)
    monkeypatch.setattr(time_to_loss, "time", made)
    monkeypatch.setattr(time_to_loss, "interface_bytes", made.interface_bytes)
    return made


def test_clock_stops_when_what_was_under_way_has_arrived(wire: Wire) -> None:
    clock = time_to_loss.TrainingClock(Place(0, "eth0", 1), quiet_s=0.5, timeout_s=60.0)
    assert clock._quiet_since() == pytest.approx(2.0, abs=0.05)
    assert wire.now == pytest.approx(2.5, abs=0.05)
    assert time_to_loss.TrainingClock(Place(0, "lo", 1), quiet_s=0.0, timeout_s=60.0)._quiet_since() == wire.now
