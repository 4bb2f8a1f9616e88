"""Which rows of a table of tests take too long together for every change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_is_slow(rows: Iterable[Any]) -> list[Any]:
    """The rows for ``parametrize``, marked slow but for the first one; a plain tuple has a value for each argument."""
    first, *rest = rows
    return [first, *(pytest.param(*(row if type(row) is tuple else (row,)), marks=pytest.mark.slow) for row in rest)]
