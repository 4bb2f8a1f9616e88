"""The registry: names, options and their errors."""

import pytest

import topologies
from topologies import Round, Topology
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
def test_a_family_of_ones_own() -> None:
    @topologies.register("hub")
    def hub(world_size: int, *, centre: int = 0) -> Topology:
        return Topology.from_rounds([Round.from_groups(world_size, [{centre, (centre + 1) % world_size}])])

    topology = topologies.build("hub", 4, centre=2)
    assert topology.round(0).groups == ((0,), (1,), (2, 3))
    assert repr(topology) == "Topology('hub', world_size=4, centre=2, period=1)"
    assert Topology.from_json(topology.to_json()) == topology
    assert topologies.build("hub", 4).options == {"centre": 0}
    assert topologies.family("hub") is hub
    assert "hub" in topologies.available()


@pytest.mark.usefixtures("own_families")
def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match=r"'mine' must be keyword-only"):

        @topologies.register("mine")
        def mine(world_size: int, hops: int) -> Topology:
            raise AssertionError(world_size, hops)
