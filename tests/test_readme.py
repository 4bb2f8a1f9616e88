"""The README's Python runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
EXPECTED = ["[array([[1.", "equal bit for bit: True", "1024 replicas", "ms a step", "exact after"]


@pytest.mark.parametrize(("block", "text"), list(zip(BLOCKS, EXPECTED, strict=True)))
def test_readme_block_runs(block: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    run = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert text in run.stdout


def test_readme_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("http", "#"))]
    paths = re.findall(r"(?:scripts|configs|docs)/[\w./]+\w", text)
    missing = [path for path in {*links, *paths} if not (ROOT / path).exists()]
    assert not missing
    assert os.listdir(ROOT / "docs")
