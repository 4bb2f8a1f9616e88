"""The topology of docs/extending/topology.md works as it stands there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from examples import defined

import topologies
from topologies.family_registry import FAMILIES


@pytest.fixture
def added() -> Iterator[None]:
    defined("docs/extending/topology.md", 0)
    yield
    FAMILIES._entries.pop("two_halves")


@pytest.mark.usefixtures("added")
def test_added_topology_is_built_by_its_name_and_agrees_after_two_rounds() -> None:
    topology = topologies.build("two_halves", 8)
    product = topology.round(1).matrix() @ topology.round(0).matrix()
    np.testing.assert_allclose(product, np.full((8, 8), 1 / 8), atol=1e-15)
    assert "two_halves" in topologies.available()


@pytest.mark.usefixtures("added")
def test_added_topology_refuses_an_odd_number_of_ranks() -> None:
    with pytest.raises(ValueError, match="world_size must be even for two halves, got 5"):
        topologies.build("two_halves", 5)
