"""What a user writes wrongly is blamed on the option: its name, its value and what is allowed."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
import torch
from hydra.errors import ConfigCompositionException
from pydantic import Field, field_validator
from repository import CONFIGS

from gossip.lab.experiments.datasets import digits, stdlib_text, text_files
from gossip.lab.experiments.lr_schedules import constant, cosine, linear
from gossip.lab.experiments.models import MLP, CharTransformer, SmallCNN
from gossip.lab.experiments.option_help import explain
from gossip.lab.experiments.partition import partition
from gossip.lab.experiments.validated_models import ConfigurationError, Model, OneOf, blaming, check_options, read


def test_suggestions_are_of_this_command() -> None:
    error = ConfigCompositionException("Could not override 'bench.stepz'.")
    for command, hint in (("bench", "did you mean bench.steps?"), ("train", "--help shows those that there are")):
        assert explain(error, CONFIGS, command) == f"the configuration has no key bench.stepz; {hint}"


def build(
    number: float,
    count: int | None = None,
    names: tuple[str, ...] = (),
    kind: Literal["a", "b"] = "a",
    anything: Any = None,
    dtype: str | torch.dtype = "",
    untyped=0,  # type: ignore[no-untyped-def]
) -> None:
    """Something that a configuration builds."""


@pytest.mark.parametrize(
    "options",
    [
        {"number": 1.5, "count": None, "names": ["a", "b"], "kind": "b", "dtype": "x"},
        {"number": {"_target_": "torch.nn.Linear"}, "names": [{"_target_": "torch.nn.Linear"}]},
        {"anything": [1], "untyped": "x", "_args_": [1], "_partial_": True},
    ],
)
def test_options_of_the_right_type_pass(options: dict[str, Any]) -> None:
    check_options("place", build, options)


@pytest.mark.parametrize(
    ("target", "options", "text"),
    [
        (build, {"number": float("inf")}, "number must be a finite number, got inf"),
        (build, {"names": ["a", 5]}, "names[1] must be a valid string, got 5"),
        (build, {"kind": "c"}, "kind must be 'a' or 'b', got 'c'"),
        (build, {"dtype": 5}, "dtype must be a valid string, got 5"),
        (partition, {"scheme": "dirichlett"}, "scheme must be 'iid', 'by_class' or 'dirichlet', got 'dirichlett'"),
        (partition, {"alpha": 0.0}, "alpha must be greater than 0, got 0.0"),
        (partition, {"shards_per_rank": 0}, "shards_per_rank must be greater than 0, got 0"),
        (digits, {"test_fraction": 1.0}, "test_fraction must be less than 1, got 1.0"),
        (stdlib_text, {"test_fraction": 0.0}, "test_fraction must be greater than 0, got 0.0"),
        (stdlib_text, {"context_length": 0}, "context_length must be greater than 0, got 0"),
        (text_files, {"max_bytes": 0}, "max_bytes must be greater than 0, got 0"),
        (MLP, {"hidden": [4, 0]}, "hidden[1] must be greater than 0, got 0"),
        (SmallCNN, {"channels": [-1]}, "channels[0] must be greater than 0, got -1"),
        *((CharTransformer, {name: 0}, f"{name} must be greater than 0") for name in ("width", "depth", "num_heads")),
        (CharTransformer, {"dropout": 1.0}, "dropout must be less than 1, got 1.0"),
        (constant, {"warmup_fraction": 1.5}, "warmup_fraction must be less than or equal to 1, got 1.5"),
        (linear, {"final_fraction": -0.5}, "final_fraction must be greater than or equal to 0, got -0.5"),
        (cosine, {"final_fraction": 1.5}, "final_fraction must be less than or equal to 1, got 1.5"),
    ],
)
def test_values_of_another_type_or_out_of_range_are_refused(
    target: Callable[..., Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_options("place", target, options)
    assert str(caught.value).startswith(f"place.{text}")


def test_blame_falls_on_what_the_text_names() -> None:
    options = {"first": 1, "second": [None, True], "_partial_": True}
    for error, line in (
        (ValueError("the second\nis too long, unlike first"), "place.second=[null,true]: the second is too long, "),
        (KeyError("images"), "place.first=1, place.second=[null,true]: KeyError: 'images'"),
        (ValueError(), "place.first=1, place.second=[null,true]: ValueError"),
    ):
        with pytest.raises(ConfigurationError) as caught, blaming("place", options):
            raise error
        assert str(caught.value).startswith(line)


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
