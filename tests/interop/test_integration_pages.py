"""The examples of the pages and docstrings about other libraries run as they stand there."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY
from running import TIMEOUT_S

PRINTED = {
    ("accelerate", 0): r"(the averaged model's error: \d+\.\d+\s+){3}",
    ("lightning", 0): r"tensor\(\d+\.\d+\)",
    ("lightning", 1): r"the averaged model's error: \d+\.\d{3}\s",
    ("transformers", 0): r"\b27584\b",
    ("schedule_free", 0): r"rank [01]: (\d\.\d{3})\s*rank [01]: \1\s",
}
"""What the examples of each page print."""


@pytest.mark.parametrize(("page", "number"), PRINTED)
def test_an_example_of_a_page(page: str, number: int, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert sum("__main__" in block for block in blocks) == sum(each == page for each, _ in PRINTED)
    (tmp_path / "example.py").write_text(blocks[number])
    run = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert run.returncode == 0, run.stderr
    assert re.search(PRINTED[page, number], run.stdout), run.stdout


def test_the_example_of_prepare() -> None:
    result = doctest.testmod(importlib.import_module("gossip.integrations.accelerate"))
    assert (result.attempted > 0, result.failed) == (True, 0)
