"""Compression in real training, over processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from compressions import COMPRESSIONS, PER_MECHANISM
from ranks import run_ranks
from replicas import SGD, TINY_BUCKETS, assert_equal_states, rank_module, snapshot, train

import gossip
from gossip import GossipDataParallel

WORLD_SIZE = 4
TOPOLOGY = {
    name: "one_peer_hypercube" if "one_peer_hypercube" in row.topologies else "ring"
    for name, row in COMPRESSIONS.items()
}


def make(name: str, transport: str = "distributed") -> GossipDataParallel:
    return GossipDataParallel(
        rank_module(),
        SGD,
        TOPOLOGY[name],
        compression=COMPRESSIONS[name].make(0),
        bucket_cap_mb=TINY_BUCKETS,
        transport=transport,
    )


def resume(name: str, folder: str) -> None:
    straight = make(name)
    train(straight, range(4))
    gossip.save(straight, folder)
    train(straight, range(4, 8))
    resumed = make(name)
    train(resumed, range(2))  # to have something to be replaced
    gossip.load(resumed, folder)
    train(resumed, range(4, 8))
    assert_equal_states(snapshot(resumed), snapshot(straight))
    debugged = make(name, transport="debug")
    train(debugged, range(8))
    assert_equal_states(snapshot(debugged), snapshot(straight))
    with straight.averaged():
        pass
    straight.global_avg()
    distance, _ = straight.consensus_distance()
    assert distance < 1e-5
    for model in (straight, resumed, debugged):
        model.close()


@pytest.mark.parametrize("name", PER_MECHANISM)
def test_training_resumes_bit_for_bit_and_is_the_same_under_debug(name: str, tmp_path: Path) -> None:
    run_ranks(resume, name, str(tmp_path), world_size=WORLD_SIZE)
