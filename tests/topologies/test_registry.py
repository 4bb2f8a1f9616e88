"""What is chosen by name: a registry of any kind, and the families with their options."""

import pytest

import topologies
from topologies import Topology
from topologies.registry import Registry


@pytest.fixture
def colours() -> Registry[type]:
    return Registry("colour", {"red": int, "blue": float})


def test_an_unknown_name_lists_all_and_the_nearest(colours: Registry[type]) -> None:
    with pytest.raises(ValueError, match=r"^unknown colour 'bleu'\. Did you mean 'blue'\? Available: blue, red$"):
        colours.get("bleu")
    with pytest.raises(ValueError, match=r"^unknown colour 'xyz'\. Available: blue, red$"):
        colours.get("xyz")


def test_a_name_is_a_text_that_is_not_taken(colours: Registry[type]) -> None:
    for use in (colours.get, colours.register):
        with pytest.raises(TypeError, match=r"the name of a colour must be a str, got .*; pass one of blue, red"):
            use(["red"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the colour name 'red' is taken by builtins\.int; choose another name"):
        colours.register("red")(str)
    assert colours.get("red") is int


@pytest.mark.usefixtures("own_families")
def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match=r"'mine' must be keyword-only"):

        @topologies.register("mine")
        def mine(world_size: int, hops: int) -> Topology:
            raise AssertionError(world_size, hops)
