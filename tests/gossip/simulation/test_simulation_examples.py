"""The examples in the docstrings of the simulation and of the probe."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import gossip.lab.probe
import gossip.simulation

NAMES = [
    module.name
    for package in (gossip.simulation, gossip.lab.probe)
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
]
WITH_EXAMPLES = {"simulate", "cluster", "workload", "links", "measuring"}


@pytest.mark.parametrize("name", NAMES)
def test_examples_of_a_module(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert (result.attempted > 0) == (name.rpartition(".")[2] in WITH_EXAMPLES)
