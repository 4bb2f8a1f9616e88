"""The examples of the pages about other libraries run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY
from running import TIMEOUT_S

PAGES = ("accelerate", "schedule_free")
PRINTED = {
    "accelerate": r"(the averaged model's error: \d+\.\d+\s+){3}",
    "schedule_free": r"rank [01]: (\d\.\d{3})\s*rank [01]: \1\s",
}


@pytest.mark.parametrize("page", PAGES)
def test_the_example_of_a_page(page: str, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(block)
    run = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert run.returncode == 0, run.stderr
    assert re.search(PRINTED[page], run.stdout), run.stdout
