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

TEXT = ("data=stdlib_text", "model=char_transformer")
DIRICHLET = "data.partition.scheme=dirichlet"
CASES: dict[str, list[str]] = {
    "optimizer.lr must be a finite number, got 'abc'": ["optimizer.lr=abc"],
    "optimizer.lr must be a finite number, got None": ["optimizer.lr=null"],
    "optimizer.lr must be a finite number, got nan": ["optimizer.lr=nan"],
    "optimizer.lr=-0.1: Invalid learning rate: -0.1; it must be a number of at least 0": ["optimizer.lr=-0.1"],
    "optimizer.lrr=1: SGD has no option lrr; did you mean lr?": ["+optimizer.lrr=1"],
    "optimizer.momentum=-1: Invalid momentum value: -1; it must be a number of at least 0": ["optimizer.momentum=-1"],
    "optimizer.momentum=0: Nesterov momentum requires a momentum": ["optimizer.momentum=0"],
    "optimizer.nesterov must be true or false, got 'maybe'": ["optimizer.nesterov=maybe"],
    "optimizer.betas must be a list of 2 numbers, got [0.9]": ["optimizer=adamw", "optimizer.betas=[0.9]"],
    "optimizer.betas=[2,3]: Invalid beta parameter": ["optimizer=adamw", "optimizer.betas=[2,3]"],
    "there is no optimizer=adamm; did you mean adamw? Available: accum_adamw, adamw, sgd": ["optimizer=adamm"],
    "model.hidden=[64 does not close its bracket [; write a list as 'model.hidden=[1,2]'": ["model.hidden=[64"],
    "model.hidden=[64]] closes a bracket that is not open: ]": ["model.hidden=[64]]"],
    "model.hidden must be a list of integers, got 64": ["model.hidden=64"],
    "model.hidden must be a list of integers, got ['a']": ["model.hidden=[a]"],
    "model.hidden=[0]: hidden must be at least 1, got 0": ["model.hidden=[0]"],
    "model.width=130: width must be a multiple of num_heads=4": [*TEXT, "model.width=130"],
    "model.tied_head must be true or false, got 5": [*TEXT, "model.tied_head=5"],
    "data.context_length must be an integer, got 'abc'": [*TEXT, "data.context_length=abc"],
    "data.test_fraction=2: test_fraction must be between 0 and 1": ["data.test_fraction=2"],
    "data.folder must be a text or a path, got 5": ["data=cifar10", "data.folder=5"],
    "data.partition.alpha=-1: alpha must be positive and finite": [DIRICHLET, "data.partition.alpha=-1"],
    "data.partition.alpha must be a finite number or null, got 'abc'": [DIRICHLET, "data.partition.alpha=abc"],
    "data.partition.scheme=dirichle: unknown scheme 'dirichle'; did you mean": ["data.partition.scheme=dirichle"],
    "scheduler.warmup_fraction=2: warmup_fraction must be between 0 and 1": ["scheduler.warmup_fraction=2"],
    "scheduler.final_fraction must be a finite number, got 'x'": ["scheduler.final_fraction=x"],
    "algorithm.gamma must be a finite number, got 'abc'": ["algorithm.gamma=abc"],
    "compression.bits=9: bits must be 4 or 8, got 9": ["compression=int8", "compression.bits=9"],
    "topology 'one_peer_exponential' mixes by another matrix": ["compression=choco"],
    "the configuration has no key topology.degree; topology.options.degree is an option of topology=random_regular": [
        "topology.degree=3"
    ],
    "topology.options.degree=abc: degree must be an integer of at least 1": [
        "topology=random_regular",
        "topology.options.degree=abc",
    ],
    "topology.options.shape=[3,3]: shape (3, 3) of topology 'torus' has 9 ranks": [
        "topology=torus",
        "topology.options.shape=[3,3]",
    ],
    "topology=null names no file of the group topology. Available: ": ["topology=null"],
    "topology=ring,torus are several values: add -m for a run of each": ["topology=ring,torus"],
    "launch.world_size must be an integer of at least 1, got 'abc'": ["launch.world_size=abc"],
    "the configuration has no key world_size; did you mean launch.world_size?": ["world_size=4"],
    "the configuration has no key lr; did you mean optimizer.lr?": ["lr=0.1"],
    "the configuration has no key training.epoch; did you mean training.epochs?": ["training.epoch=1"],
    "the configuration has no key topology.options.k; it is an option of topology=base, ": ["topology.options.k=1"],
    "the configuration has no key zzzz; --help shows those that there are": ["zzzz=1"],
    "training.epochs must be an integer of at least 1, got 0": ["training.epochs=0"],
    "training.epochs has no value; write training.epochs=...": ["training.epochs"],
    "seed must be an integer of at least 0, got 'x'": ["seed=x"],
    "imports=abc is no list of modules; write imports=[module]": ["imports=abc"],
    "output_root= names no folder; write output_root=.": ["output_root="],
    "=5 has no option before its =; write option=value": ["=5"],
    "there is no flag --multirn; did you mean --multirun? Options are written without dashes": ["--multirn"],
    "--multirun=5: --multirun takes no value": ["--multirun=5"],
    "'seed=1 does not close its quote; write 'seed=value'": ["'seed=1"],
    "optimizer.lr=a=b is no option=value (": ["optimizer.lr=a=b"],
    "optimizer.lr cannot be resolved: Interpolation key 'nothing' not found": ["optimizer.lr=${nothing}"],
}


@pytest.mark.parametrize(("line", "arguments"), CASES.items(), ids=[" ".join(each) for each in CASES.values()])
def test_wrong_option_is_named(command: CommandLine, line: str, arguments: list[str], tmp_path: Path) -> None:
    status, stderr = command(*arguments)
    assert status == 2
    assert stderr.startswith(f"error: {line}")
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_suggestions_are_of_this_configuration(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did you mean topology.options.local_size?" in command("topology=local_global", "topology.localsize=2")[1]
    monkeypatch.setattr("sys.argv", ["bench.py", "bench.stepz=3"])
    from hydra.errors import ConfigCompositionException

    error = ConfigCompositionException("Could not override 'bench.stepz'.")
    assert explain(error, CONFIGS, "bench") == "the configuration has no key bench.stepz; did you mean bench.steps?"


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
        {"number": 1},
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
        ({"number": True}, "place.number must be a finite number, got True"),
        ({"number": float("inf")}, "place.number must be a finite number, got inf"),
        ({"count": 1.0}, "place.count must be an integer or null, got 1.0"),
        ({"names": "ab"}, "place.names must be a list of texts, got 'ab'"),
        ({"kind": "c"}, "place.kind must be a or b, got 'c'"),
        ({"dtype": 5}, "place.dtype must be a text, got 5"),
        (
            {"cuont": True},
            "place.cuont=true: build has no option cuont; did you mean count? Its parameters are number, ",
        ),
    ],
)
def test_options_of_another_type_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_options("place", build, options)
    assert str(caught.value).startswith(text)


def test_blame_falls_on_what_the_text_names_or_what_it_works_without() -> None:
    options = {"first": 1, "second": [None, True], "_partial_": True}
    named = blaming("place", options, ValueError("the second\nis too long, unlike first"), lambda _: False)
    assert str(named) == "place.second=[null,true]: the second is too long, unlike first"
    works = blaming("place", options, ValueError("too long"), lambda option: option == "second")
    assert str(works) == "place.second=[null,true]: too long"
    unknown = blaming("place", options, ValueError(), lambda _: False)
    assert str(unknown) == "place.first=1, place.second=[null,true]: ValueError"
