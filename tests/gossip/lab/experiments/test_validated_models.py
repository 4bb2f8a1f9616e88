"""What is wrong with a user's value is one line: the key, the value, what is allowed."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field, field_validator

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
    world_size: int = Field(ge=2, alias="ranks")
    model: Annotated[str, OneOf(["mlp", "cnn"])]
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    timeout_s: float
    link: Link


GOOD: dict[str, Any] = {
    "steps": 1,
    "ranks": 2,
    "model": "mlp",
    "seeds": [0, 1],
    "timeout_s": 1,
    "link": {"rate": "5mbit"},
}


def test_a_section_is_read_with_lists_as_tuples_and_integers_as_floats() -> None:
    settings = read(Settings, GOOD, "bench")
    assert (settings.seeds, settings.timeout_s, settings.world_size) == ((0, 1), 1.0, 2)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"steps": 0}, "bench.steps must be greater than or equal to 1, got 0"),
        ({"model": "mpl"}, "there is no bench.model=mpl; did you mean mlp? Available: mlp, cnn"),
        ({"seeds": []}, "bench.seeds must have at least 1 item after validation, not 0, got []"),
        ({"seeds": [-1]}, "bench.seeds[0] must be greater than or equal to 0, got -1"),
        ({"timeout_s": float("inf")}, "bench.timeout_s must be a finite number, got inf"),
        ({"steps": True}, "bench.steps must be a valid integer, got True"),
        ({"link": {}}, "the configuration has no key bench.link.rate; set bench.link.rate=..."),
        ({"link": {"rate": "5"}}, "bench.link.rate must be in mbit, got '5'"),
        ({"stepps": 1, "steps": 0}, "the configuration has no key bench.stepps; did you mean bench.steps?"),
    ],
)
def test_the_first_bad_value_is_said_in_one_line(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        read(Settings, {**GOOD, **changed}, "bench")
    assert str(refusal.value) == line
