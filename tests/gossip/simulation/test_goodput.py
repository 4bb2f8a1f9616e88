"""Simulated goodput against what can be computed by hand, where failures are rare, and where they are not."""

import math
from dataclasses import astuple
from typing import Any

import pytest

from gossip import Cluster, Failures, simulate_goodput

CLUSTER = Cluster(64, 8)
HOURS = 50_000.0
COSTS: dict[str, Any] = {
    "step_s": 2.0,
    "detect_s": 3.0,
    "restart_s": 90.0,
    "rejoin_s": 20.0,
    "waits_s": 5.0,
    "save_s": 8.0,
}


@pytest.mark.parametrize("method", ["restart", "quorum", "gossip"])
@pytest.mark.parametrize("hours_per_failure", [20.0, 2_000.0, HOURS])
def test_rank_seconds_are_shared_out(method: Any, hours_per_failure: float) -> None:
    found = simulate_goodput(CLUSTER, Failures(hours_per_failure, **COSTS), method, hours=500)
    assert sum(astuple(found)) == pytest.approx(1)
    assert min(astuple(found)) >= 0


def test_rare_failures_cost_what_they_cost_one_by_one() -> None:
    failures, hours = Failures(HOURS, **COSTS), 1e6
    rate = CLUSTER.world_size / HOURS / 3600  # of all ranks, per second
    every_s = math.sqrt(2 * failures.save_s / rate)
    away_s = failures.detect_s + failures.restart_s + failures.rejoin_s
    restart = simulate_goodput(CLUSTER, failures, "restart", hours=hours)
    assert restart.saving == pytest.approx(failures.save_s / (every_s + failures.save_s), rel=0.01)
    assert restart.redone == pytest.approx(rate * every_s / 2, rel=0.05)
    assert restart.down == pytest.approx(rate * away_s, rel=0.05)
    quorum = simulate_goodput(CLUSTER, failures, "quorum", hours=hours)
    assert quorum.waiting == pytest.approx(rate * (failures.detect_s + failures.waits_s) * 63.5 / 64, rel=0.05)
    assert quorum.redone == pytest.approx(rate * failures.step_s / 2, rel=0.05)
    gossip = simulate_goodput(CLUSTER, failures, "gossip", hours=hours)
    assert gossip.waiting == pytest.approx(rate * failures.detect_s * 63 / 64, rel=0.05)
    assert gossip.down == quorum.down == pytest.approx(rate * away_s / 64, rel=0.05)
    assert gossip.redone == pytest.approx(rate * failures.step_s * 2 / 64, rel=0.05)


def test_nobody_trains_while_too_few_ranks_are_there() -> None:
    few = {
        share: simulate_goodput(Cluster(4), Failures(2.0, min_share=share), "gossip", hours=2000) for share in (0, 1)
    }
    assert few[0].down == few[1].down > 0.005
    assert few[0].waiting < 0.001
    assert few[1].waiting == pytest.approx(3 * few[1].down, rel=0.1)
