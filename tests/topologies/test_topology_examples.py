"""The examples in the docstrings run as they stand."""

import doctest
import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import topologies
from topologies import registry

MODULES = ["topologies", *(found.name for found in pkgutil.walk_packages(topologies.__path__, "topologies."))]


@pytest.fixture(autouse=True)
def _own_families() -> Iterator[None]:
    before = dict(registry._FAMILIES)
    yield
    registry._FAMILIES.clear()
    registry._FAMILIES.update(before)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = sum(len(test.examples) for test in finder.find(topologies.round))
    assert examples >= 3
