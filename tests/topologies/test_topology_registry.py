"""The registry: names, options and their errors."""

import pytest

import topologies
from topologies import Topology
from topologies.family_registry import FAMILIES


@pytest.fixture
def own_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))


def test_an_unknown_option_lists_the_options() -> None:
    with pytest.raises(
        TypeError, match=r"'local_global' has no option 'localsize'.*mean 'local_size'.*are: local_size"
    ):
        topologies.build("local_global", 8, localsize=2)
    with pytest.raises(TypeError, match=r"'ring' has no option 'seed'; it has no options"):
        topologies.build("ring", 8, seed=2)
    with pytest.raises(TypeError, match=r"'local_global' needs the option 'local_size'"):
        topologies.build("local_global", 8)


@pytest.mark.usefixtures("own_families")
def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match=r"'mine' must be keyword-only"):

        @topologies.register("mine")
        def mine(world_size: int, hops: int) -> Topology:
            raise AssertionError(world_size, hops)
