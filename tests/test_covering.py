"""The covering arrays by which tests choose their cases."""

import itertools

import pytest
from covering import covering, pairs_of

SIZES = [(), (3,), (2, 2), (5, 4, 4, 3), (7, 2, 2), (2,) * 10]
TABLES = [list(itertools.product(*map(range, sizes))) for sizes in SIZES]
TABLES += [[row for row in table if sum(row) % 3] for table in TABLES]  # some combinations cannot be


@pytest.mark.parametrize("table", TABLES, ids=len)
def test_every_pair_that_can_be_is_covered(table: list[tuple[int, ...]]) -> None:
    chosen = covering(table)
    assert {pair for row in chosen for pair in pairs_of(row)} == {pair for row in table for pair in pairs_of(row)}
    assert chosen == [row for row in table if row in chosen]
    assert chosen == covering(iter(table))


@pytest.mark.parametrize(("sizes", "most"), [((5, 4, 4, 3), 25), ((7, 2, 2), 14), ((2,) * 10, 12)])
def test_rows_are_few(sizes: tuple[int, ...], most: int) -> None:
    chosen = covering(itertools.product(*map(range, sizes)))
    assert sizes[0] * sizes[1] <= len(chosen) <= most
