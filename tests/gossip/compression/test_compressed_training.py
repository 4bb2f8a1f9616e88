"""Compression in real training, over processes."""

import pytest
from compressions import COMPRESSIONS, PER_MECHANISM
from ranks import run_ranks
from replicas import SGD, TINY_BUCKETS, assert_equal_states, rank_module, snapshot, train

from gossip import GossipDataParallel

WORLD_SIZE = 4
TOPOLOGY = {
    name: "one_peer_hypercube" if "one_peer_hypercube" in row.topologies else "ring"
    for name, row in COMPRESSIONS.items()
}


def make(name: str, transport: str) -> GossipDataParallel:
    return GossipDataParallel(
        rank_module(),
        SGD,
        TOPOLOGY[name],
        compression=COMPRESSIONS[name].make(0),
        bucket_cap_mb=TINY_BUCKETS,
        transport=transport,
    )


def train_over_both_transports(name: str) -> None:
    found = []
    for transport in ("distributed", "debug"):
        with make(name, transport) as model:
            train(model, range(8))
            found.append(snapshot(model))
    assert_equal_states(*found)


@pytest.mark.parametrize("name", PER_MECHANISM)
def test_training_is_the_same_under_debug(name: str) -> None:
    run_ranks(train_over_both_transports, name, world_size=WORLD_SIZE)
