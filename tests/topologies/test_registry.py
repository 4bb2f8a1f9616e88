"""Registry: what is chosen by name."""

import pytest

from topologies.registry import Registry


@pytest.fixture
def colours() -> Registry[type]:
    return Registry("colour", {"red": int, "blue": float})


def test_what_is_decorated_is_found_and_stays_what_it_is(colours: Registry[type]) -> None:
    @colours.register("green")
    class Green:
        pass

    assert colours.get("green") is Green
    assert colours.get("red") is int
    assert colours.available() == ("blue", "green", "red")


def test_an_unknown_name_lists_all_and_the_nearest(colours: Registry[type]) -> None:
    with pytest.raises(ValueError, match=r"^unknown colour 'bleu'\. Did you mean 'blue'\? Available: blue, red$"):
        colours.get("bleu")
    with pytest.raises(ValueError, match=r"^unknown colour 'xyz'\. Available: blue, red$"):
        colours.get("xyz")


@pytest.mark.parametrize("name", [None, 1, ["red"]])
def test_a_name_is_a_text(name: object, colours: Registry[type]) -> None:
    with pytest.raises(TypeError, match=r"the name of a colour must be a str, got .*; pass one of blue, red"):
        colours.get(name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the name of a colour must be a str"):
        colours.register(name)  # type: ignore[arg-type]


def test_a_taken_name_is_refused_with_whose_it_is(colours: Registry[type]) -> None:
    with pytest.raises(ValueError, match=r"the colour name 'red' is taken by builtins\.int; choose another name"):
        colours.register("red")(str)
    assert colours.get("red") is int
