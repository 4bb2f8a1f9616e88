"""Which rows of a table of tests take too long together for every change."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_is_slow(rows: Iterable[Any], num_quick: int = 1) -> list[Any]:
    """The rows for ``parametrize``, marked slow but for the first ones; a plain tuple has a value for each argument."""
    return [
        row if number < num_quick else pytest.param(*(row if type(row) is tuple else (row,)), marks=pytest.mark.slow)
        for number, row in enumerate(rows)
    ]
