"""The examples of a page of the documentation run as one session, and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY

PAGES = ["modes", "module_state", "schedules"]
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
"""An example, and what it prints where the page shows that."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((REPOSITORY / "docs" / f"{page}.md").read_text())
    script = tmp_path / "session.py"
    script.write_text("\n".join(code for code, _ in blocks))
    run = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "".join(printed for _, printed in blocks)
