"""The topology of docs/extending/topology.md works as it stands there."""

from __future__ import annotations

import numpy as np
import pytest
from examples import defined

import topologies
from topologies.family_registry import FAMILIES


def test_added_topology_is_built_by_its_name_and_agrees_after_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))
    defined("docs/extending/topology.md", 0)
    topology = topologies.build("two_halves", 8)
    product = topology.round(1).matrix() @ topology.round(0).matrix()
    np.testing.assert_allclose(product, np.full((8, 8), 1 / 8), atol=1e-15)
    with pytest.raises(ValueError, match="world_size must be even for two halves, got 5"):
        topologies.build("two_halves", 5)
