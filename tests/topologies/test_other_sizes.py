"""The same topology for another number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

import topologies
from topologies import Topology


def assert_same(found: Topology, expected: Topology) -> None:
    assert (found.name, found.world_size, found.options) == (expected.name, expected.world_size, expected.options)
    for t in range(12):
        np.testing.assert_array_equal(found.round(t).matrix(), expected.round(t).matrix())


@pytest.mark.parametrize("world_size", [1, 3, 5, 8])
def test_a_family_keeps_its_options(world_size: int) -> None:
    topology = topologies.build("base", 6, k=2)
    assert_same(topology.resized(world_size), topologies.build("base", world_size, k=2))


def test_expressions_are_built_of_their_parts() -> None:
    def build(n: int) -> Topology:
        first = topologies.build("complete", n).every(2)
        later = topologies.build("ring", n).interleave(topologies.build("star", n))
        return first.then(later.averaged_every(5), after=6)

    assert_same(build(8).resized(5), build(5))


@pytest.mark.parametrize(
    "topology",
    [
        topologies.build("ring", 4).permuted([1, 0, 2, 3]),
        Topology.from_rounds([topologies.build("ring", 4).round(0)]),
        Topology.from_function(lambda t: topologies.build("one_peer_ring", 4).round(t % 6), period=6).every(2),
    ],
    ids=["permuted", "rounds", "function"],
)
def test_what_was_made_for_its_own_ranks_is_refused(topology: Topology) -> None:
    with pytest.raises(ValueError, match=r"was made for 4 ranks by rounds, a product or a permutation of its own"):
        topology.resized(3)
