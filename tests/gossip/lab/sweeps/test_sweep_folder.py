"""The folder of a sweep that no experiment names."""

from __future__ import annotations

import pytest

from gossip.lab.sweeps.sweep_folder import option

BASE = ("topology=ring,base", "launch.world_size=8", "seed=0,1")


def folder(*arguments: str) -> str:
    (chosen,) = option(arguments)
    return chosen


@pytest.mark.parametrize(
    "arguments",
    [
        ("launch.world_size=8", "seed=range(5)", "topology=ring,base"),
        ("topology=ring,base,star", "launch.world_size=8"),
        (*BASE, "hydra/launcher=basic", "hydra.launcher.n_jobs=1", "figures=true", "output_root=elsewhere"),
        (*BASE, "sweep.target=0.9", "--multirun"),
    ],
)
def test_folder_is_found_again_by_the_same_sweep(arguments: tuple[str, ...]) -> None:
    assert folder(*arguments) == folder(*BASE)


@pytest.mark.parametrize(
    "arguments",
    [
        ("topology=ring,base", "launch.world_size=16", "seed=0,1"),
        (*BASE, "training.steps=10"),
        (*BASE, "+data.noise=0.1"),
    ],
)
def test_folder_is_another_one_for_another_sweep(arguments: tuple[str, ...]) -> None:
    assert folder(*arguments) != folder(*BASE)


def test_folder_name_says_what_is_swept_and_what_is_set() -> None:
    assert folder(*BASE).startswith("hydra.sweep.dir=${output_root}/sweeps/world_size-8_topology_")
    assert folder().startswith("hydra.sweep.dir=${output_root}/sweeps/defaults_")


@pytest.mark.parametrize("argument", ["experiment=smoke", "hydra.sweep.dir=mine", "topology=[ring"])
def test_folder_is_not_chosen_where_the_command_line_does_or_cannot_be_read(argument: str) -> None:
    assert option([*BASE, argument]) == []
