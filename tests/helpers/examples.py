"""The Python examples of README.md and of the pages in docs."""

import re
from typing import Any
from unittest.mock import patch

from repository import REPOSITORY

from gossip import ALGORITHMS, COMPRESSIONS

BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
"""An example, and what it prints where the page shows that."""


def code(page: str, number: int) -> str:
    """Return one block of code of a page, as it stands there.

    A test that calls this, or lists ``(page, number)``, claims the block; tests/test_pages.py fails for a block that
    no test claims.
    """
    return BLOCK.findall((REPOSITORY / page).read_text())[number][0]


def defined(page: str, number: int, **names: Any) -> dict[str, Any]:
    """Return what a block of code defines, by name; ``names`` are those that it takes from its surroundings."""
    names |= {"__name__": "example"}
    with patch.dict(ALGORITHMS._entries), patch.dict(COMPRESSIONS._entries):  # other tests list what is registered
        exec(compile(code(page, number), page, "exec"), names)
    return names
