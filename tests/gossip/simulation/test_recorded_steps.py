"""Predictions against step times that were measured in the lab of network namespaces.

The measurements are recorded: ``measured_steps.json`` holds what a probe of four hosts found, the time of a step of
each method on them, and the machine. Times of a machine that is busy with other tests could not be held to anything.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from pydantic import BaseModel
from tiers import rest_is_slow

import topologies
from gossip import Cluster, RandomDelays, SlowRank, Workload, simulate_time

STRAGGLERS = {"none": (), "exponential": (RandomDelays(0.05),), "one_slow": (SlowRank(0, 2.0),)}


class Case(BaseModel):
    """Steps with one rate of every link and one kind of straggler, beside the probe, which was made without it."""

    rate: str
    straggler: str
    cluster: Cluster
    workload: Workload
    step_s: dict[str, float]

    def predict(self, method: str) -> float:
        """Of many steps, so that the prediction is free of the random variation of the measured ones."""
        workload = dataclasses.replace(self.workload, stragglers=STRAGGLERS[self.straggler])
        simulated = method if method == "ddp" else topologies.build(method, self.cluster.world_size)
        return simulate_time(simulated, self.cluster, workload, 1000).step_time_s


RECORDED = json.loads((Path(__file__).parent / "measured_steps.json").read_text())
CASES = [Case.model_validate(case) for case in RECORDED["cases"]]
PREDICTED = ("ddp", "one_peer_exponential", "ring", "complete")
RATES = ("100mbit", "200mbit", "1000mbit")


def test_recorded_are_all_rates_with_and_without_stragglers() -> None:
    recorded = {(case.rate, case.straggler) for case in CASES}
    assert recorded == set(itertools.product(RATES, STRAGGLERS))
    assert all(case.cluster.num_nodes == 4 for case in CASES)
    assert all(set(PREDICTED) <= set(case.step_s) for case in CASES)


@pytest.mark.parametrize("method", PREDICTED)
@pytest.mark.parametrize("case", rest_is_slow(CASES), ids=lambda case: f"{case.rate}-{case.straggler}")
def test_predictions_are_within_20_percent_of_recorded_measurements(case: Case, method: str) -> None:
    ratio = case.predict(method) / case.step_s[method]
    assert 0.8 < ratio < 1.2, f"recorded measurement on {RECORDED['machine']}"
