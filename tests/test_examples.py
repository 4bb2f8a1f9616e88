"""The examples in the docstrings of both packages run as they stand."""

import doctest
import importlib
from pathlib import Path

import pytest
from repository import REPOSITORY

import topologies


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


# By their text: what is not run needs none of what it imports.
WITH_EXAMPLES = [
    module_of(path)
    for package in ("gossip", "topologies")
    for path in sorted((REPOSITORY / package).rglob("*.py"))
    if ">>> " in path.read_text() and "integrations" not in path.parts  # tests/interop runs theirs
]


@pytest.mark.usefixtures("own_families")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_a_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(name), extraglobs={"topologies": topologies})
    assert result.attempted > 0
    assert result.failed == 0
