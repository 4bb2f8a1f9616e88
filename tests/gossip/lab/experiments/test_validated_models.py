"""What is wrong with a user's value is one line: the key, the value, what is allowed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveFloat, field_validator

from gossip.lab.experiments.validated_models import ConfigurationError, Model, OneOf, read


class Link(Model):
    rate: str

    @field_validator("rate")
    @classmethod
    def _is_a_rate(cls, rate: str) -> str:
        if not rate.endswith("mbit"):
            raise ValueError(f"rate must be in mbit, got {rate!r}")
        return rate


class Settings(Model):
    steps: int = Field(ge=1)
    world_size: int = Field(ge=2, le=200, alias="ranks")
    model: Annotated[str, OneOf(["mlp", "cnn"])]
    network: Literal["loopback", "lab"]
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    timeout_s: PositiveFloat
    port: int | None = Field(None, ge=1)
    predict: bool
    link: Link


GOOD: dict[str, Any] = {
    "steps": 1,
    "ranks": 2,
    "model": "mlp",
    "network": "lab",
    "seeds": [0, 1],
    "timeout_s": 1,
    "predict": True,
    "link": {"rate": "5mbit"},
}


def test_a_section_is_read_with_lists_as_tuples_and_integers_as_floats() -> None:
    settings = read(Settings, GOOD, "bench")
    assert (settings.seeds, settings.timeout_s, settings.world_size, settings.port) == ((0, 1), 1.0, 2, None)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"steps": 0}, "bench.steps must be an integer of at least 1, got 0"),
        ({"steps": "none"}, "bench.steps must be an integer of at least 1, got 'none'"),
        ({"ranks": 201}, "bench.ranks must be an integer between 2 and 200, got 201"),
        ({"model": "mpl"}, "there is no bench.model=mpl; did you mean mlp? Available: mlp, cnn"),
        ({"network": "x"}, "there is no bench.network=x. Available: loopback, lab"),
        ({"seeds": []}, "bench.seeds must be a list of at least one value, got []"),
        ({"seeds": [-1]}, "bench.seeds must be an integer of at least 0, got -1"),
        ({"timeout_s": float("inf")}, "bench.timeout_s must be a positive number, got inf"),
        ({"port": "x"}, "bench.port must be an integer of at least 1 or null, got 'x'"),
        ({"predict": 1}, "bench.predict must be true or false, got 1"),
        ({"link": 1}, "bench.link must be a mapping, got 1"),
        ({"link": {}}, "the configuration has no key bench.link.rate; set bench.link.rate=..."),
        ({"link": {"rate": "5"}}, "bench.link.rate must be in mbit, got '5'"),
        ({"stepps": 1}, "the configuration has no key bench.stepps; did you mean bench.steps?"),
    ],
)
def test_the_first_bad_value_is_said_in_one_line(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        read(Settings, {**GOOD, **changed}, "bench")
    assert str(refusal.value) == line
