"""The samples of ranks that are lost and join: each has its own, whatever changes it has been through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from composing import composed

from gossip.lab.experiments.elastic_shards import ElasticShards
from gossip.lab.experiments.experiment_build import build

HISTORY = [(0, 1, 2), (0, 2), (0, 2, 3), (2, 3, 4)]


def samples_of(experiment: Any, member: int) -> list[bytes]:
    """The samples of a member after it has trained among the ranks of its time, in the steps left of an epoch."""
    method = SimpleNamespace(world=SimpleNamespace(member=member))
    shards = ElasticShards(experiment, method)  # type: ignore[arg-type]
    for step, members in enumerate(HISTORY):
        if member in members:
            method.members = members
            shards.batch(step)
    rest = range(step, experiment.shards.steps_per_epoch)
    return [experiment.data.train_inputs[place].numpy().tobytes() for step in rest for place in shards.batch(step)]


@pytest.mark.parametrize("on_loss", ["redistribute", "leave"])
def test_ranks_that_joined_at_different_times_have_different_samples(on_loss: str) -> None:
    experiment = build(composed("launch.world_size=3", "wrapper.on_peer_loss=continue", f"data.on_loss={on_loss}"))
    of_members = [samples_of(experiment, member) for member in HISTORY[-1]]
    seen = [sample for samples in of_members for sample in samples]
    assert len(seen) > len(experiment.data.train_targets) / 2
    assert len(set(seen)) == len(seen)
