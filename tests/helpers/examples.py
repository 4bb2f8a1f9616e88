"""The code of the pages in docs/extending."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

from repository import REPOSITORY

from gossip import ALGORITHMS, COMPRESSIONS


def example(page: str) -> dict[str, Any]:
    """Return what the code of docs/extending/PAGE.md defines, by name."""
    text = (REPOSITORY / "docs" / "extending" / f"{page}.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "extending"}
    with patch.dict(ALGORITHMS._entries), patch.dict(COMPRESSIONS._entries):  # other tests list what is registered
        exec(compile(code, f"docs/extending/{page}.md", "exec"), names)
    return names
