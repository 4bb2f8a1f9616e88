"""Covering arrays: few rows of a table, in which every pair of values still occurs."""

import itertools
import random
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])


def covering(rows: Iterable[Row]) -> list[Row]:
    """Rows in which all values of any two columns meet that meet in ``rows``, in the order of ``rows``.

    For factors that are independent: what is wrong with a value, or with two values together, is then found without
    their full product. Combinations that cannot be are left out of ``rows``.

    Greedy, and the same each time: rows with the most pairs that are new come first. Among equals the order is drawn,
    with a fixed seed, so that a third column does not keep its first value wherever two of them decide.

    Examples
    --------
    >>> covering(itertools.product("ab", "xy", (0, 1)))
    [('a', 'x', 1), ('a', 'y', 0), ('b', 'x', 0), ('b', 'y', 1)]
    """
    table = list(rows)
    pairs = [set(pairs_of(row)) for row in table]
    missing = set().union(*pairs)
    drawn = random.Random(0).sample(range(len(table)), len(table))
    chosen: set[int] = set()
    for num_new in range(max(map(len, pairs), default=0), 0, -1):
        for place in drawn:
            if len(pairs[place] & missing) >= num_new:  # never more than before, as others cover them
                chosen.add(place)
                missing -= pairs[place]
    return [table[place] for place in sorted(chosen)]


def pairs_of(row: tuple[Hashable, ...]) -> Iterator[tuple[tuple[int, Hashable], ...]]:
    """Any two of a row's values, each with its column."""
    return itertools.combinations(enumerate(row), 2)
