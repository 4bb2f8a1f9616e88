"""The code of CONTRIBUTING.md."""

from __future__ import annotations

import re
from typing import Any

from repository import REPOSITORY


def example(heading: str) -> dict[str, Any]:
    """What the code under a heading of CONTRIBUTING.md defines, by name."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "contributing"}
    exec(compile(code, f"CONTRIBUTING.md: {heading}", "exec"), names)
    return names
