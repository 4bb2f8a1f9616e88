"""What a new user writes wrongly: one line that names option and value and what is allowed, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from composing import CommandLine
from repository import CONFIGS

from gossip.lab.experiments.config_errors import explain
from gossip.lab.experiments.options import blaming, check_options
from gossip.lab.experiments.validated_models import ConfigurationError

DIRICHLET = "data.partition.scheme=dirichlet"
CASES: dict[str, list[str]] = {
    "optimizer.lr must be a valid number, got 'abc'": ["optimizer.lr=abc"],
    "optimizer.lr=-0.1, optimizer.momentum=0.9, ": ["optimizer.lr=-0.1"],
    "optimizer.lrr=1: SGD has no option lrr; did you mean lr?": ["+optimizer.lrr=1"],
    "model.hidden=[64 cannot be read as option=value; quote lists and texts, as in 'key=[1,2]' (": ["model.hidden=[64"],
    "data.partition.alpha must be a valid number, got 'abc'": [DIRICHLET, "data.partition.alpha=abc"],
    "compression.bits=9: bits must be 4 or 8, got 9": ["compression=int8", "compression.bits=9"],
    "the configuration has no key topology.degree; did you mean topology.options.degree?": ["topology.degree=3"],
    "topology.options.degree=abc: degree must be an integer of at least 1": [
        "topology=random_regular",
        "topology.options.degree=abc",
    ],
    "every argument is option=value, and a config group takes the name of one of its files": ["topology=null"],
    "topology=ring,torus are several values: add -m for a run of each": ["topology=ring,torus"],
    "the configuration has no key topology.options.k; it is an option of topology=base, ": ["topology.options.k=1"],
    "the configuration has no key zzzz; --help shows those that there are": ["zzzz=1"],
    "training.epochs has no value; write training.epochs=...": ["training.epochs"],
    "imports=abc is no list of modules; write imports=[module]": ["imports=abc"],
    "output_root= names no folder; write output_root=.": ["output_root="],
    "there is no flag --multirn; did you mean --multirun? Options are written without dashes": ["--multirn"],
    "--multirun=5: --multirun takes no value": ["--multirun=5"],
    "optimizer.lr cannot be resolved: Interpolation key 'nothing' not found": ["optimizer.lr=${nothing}"],
}


@pytest.mark.parametrize(("line", "arguments"), CASES.items(), ids=[" ".join(each) for each in CASES.values()])
def test_wrong_option_is_named(command: CommandLine, line: str, arguments: list[str], tmp_path: Path) -> None:
    status, stderr = command(*arguments)
    assert status == 2
    assert stderr.startswith(f"error: {line}")
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_suggestions_are_of_this_command() -> None:
    from hydra.errors import ConfigCompositionException

    error = ConfigCompositionException("Could not override 'bench.stepz'.")
    assert explain(error, CONFIGS, "bench") == "the configuration has no key bench.stepz; did you mean bench.steps?"
    assert (
        explain(error, CONFIGS, "train")
        == "the configuration has no key bench.stepz; --help shows those that there are"
    )


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
    ("options", "text"),
    [
        ({"number": float("inf")}, "place.number must be a finite number, got inf"),
        ({"names": ["a", 5]}, "place.names[1] must be a valid string, got 5"),
        ({"kind": "c"}, "place.kind must be 'a' or 'b', got 'c'"),
        ({"dtype": 5}, "place.dtype must be a valid string, got 5"),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_options("place", build, options)
    assert str(caught.value).startswith(text)


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
