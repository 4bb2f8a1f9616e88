"""A rank whose values are finite but wrong is named at once, and nobody is named where nothing is wrong."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from wrong_ranks import WRONG, Stuck, multilayer_perceptron, randomise, scale, train

import topologies
from gossip import DistributedTransport, GossipDataParallel
from gossip.algorithms import VALUES
from gossip.compression.conversation import squared_norm
from gossip.exchange.outlier_detection import OutlierDetector, Usual
from gossip.measuring.step_stats import Meter

FAULT_AT = 50


def wide() -> nn.Module:
    """Its bucket is large enough for all-reduce."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10))


def normalised() -> nn.Module:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(features, nn.Linear(288, 10))


def linear() -> nn.Module:
    """It starts at zero."""
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def cosine_with_restarts(step: int) -> float:
    return 1e-4 + 0.5 * (1 + torch.tensor(step % 30 / 30 * torch.pi).cos().item())


ON_WIRE: Mapping[str, Any] = {"topology": "complete", "transport": partial(DistributedTransport, shares_memory=False)}
FAULTS: Mapping[str, Mapping[str, Any]] = {
    "pairs": {"topology": "one_peer_exponential"},
    "int8": {"topology": "ring", "compression": "int8"},
    "choco": {"topology": "ring", "compression": "choco"},
    "all-reduce": ON_WIRE,
    "continue": {"topology": "ring", "on_peer_loss": "continue"},
    "in optimizer.step()": {"topology": "random_matching", "step_in_backward": False, "algorithm": "atc"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), list(zip(FAULTS, itertools.cycle((scale, randomise)), strict=False)))
def test_wrong_values_are_named_within_two_exchanges(name: str, fault: Callable[[GossipDataParallel], None]) -> None:
    options = FAULTS[name]
    courses = run_ranks(train, FAULT_AT + 4, fault, FAULT_AT, options, wide, world_size=4)
    first = [step for course in courses if (step := course.first(WRONG)) is not None]
    assert first
    assert FAULT_AT <= min(first) <= FAULT_AT + 2
    assert not any(sum(counted.values()) for course in courses for counted in course.unusual[: min(first)])
    assert any(f"the values of rank {WRONG} have jumped" in text for course in courses for text in course.warnings)


def test_a_stuck_rank_says_so() -> None:
    options = {"optimizer": partial(Stuck, lr=0.05, since=FAULT_AT), "step_in_backward": False}
    courses = run_ranks(train, FAULT_AT + 22, None, 0, options, world_size=4)
    assert FAULT_AT + 18 <= (courses[WRONG].first(WRONG) or 0) <= FAULT_AT + 21
    assert [len(course.warnings) for course in courses] == [0, 0, 1, 0]
    assert f"rank {WRONG} is stuck" in courses[WRONG].warnings[0]


def test_a_rank_that_is_not_to_change_is_not_stuck() -> None:
    watch, meter = OutlierDetector(0, lambda _: 1.0), Meter()
    for step in range(60):
        watch.send(0, torch.ones(3), step, meter, lambda: False)
        watch.judge((0, VALUES), step, {(1,): 1.0}, meter)
    assert not meter.unusual_by_peer


def test_what_is_unusual_along_a_new_edge_is_named_in_every_exchange() -> None:
    """What is usual along the rank's other edges is what it is compared with, however often it is unusual."""
    watch, meter = OutlierDetector(0, lambda _: 1.0), Meter()
    for step in range(30):
        place, edge = (0, VALUES), (1,) if step < 20 else (2,)
        watch.judge(place, step, {edge: 1.0 if step < 20 else 1e6}, meter)
    assert meter.unusual_by_peer == {2: 10}


def test_what_is_usual_stays_until_all_are_unusual_for_long() -> None:
    usual = Usual(distance=1.0, num_known=4)
    for _ in range(20):
        usual.learn(1e6, is_unusual=True)
    assert usual.distance == 1.0
    usual.learn(1e6, is_unusual=True)
    assert 1.0 < usual.distance < 1.1


def test_values_whose_squares_overflow_are_finite() -> None:
    assert squared_norm(torch.full((4,), 1e30)) == pytest.approx(4e60)


CLEAN: Mapping[str, tuple[Callable[[], nn.Module], Mapping[str, Any]]] = {
    "atc, ring": (multilayer_perceptron, {"algorithm": "atc", "topology": "ring"}),
    "local steps": (multilayer_perceptron, {"topology": topologies.build("complete", 4).every(10)}),
    "all-reduce": (wide, ON_WIRE),
    "batch norm": (normalised, {"buffers": "average"}),
    "restarts": (linear, {"schedule": cosine_with_restarts, "topology": "ring"}),
    "int4": (wide, {"compression": "int4", "topology": "ring", "optimizer": partial(torch.optim.AdamW, lr=3e-3)}),
    "powergossip": (multilayer_perceptron, {"compression": "powergossip", "topology": "ring"}),
    "tracking": (multilayer_perceptron, {"algorithm": "gradient_tracking", "topology": "ring"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make_module", "options"), CLEAN.values(), ids=CLEAN.keys())
def test_nothing_is_unusual_where_nothing_is_wrong(
    make_module: Callable[[], nn.Module], options: Mapping[str, Any]
) -> None:
    for course in run_ranks(train, 150, None, 0, options, make_module, world_size=4):
        assert not course.warnings
        assert not any(sum(counted.values()) for counted in course.unusual)
