"""simple_base and base: the matrices of the definition, written out by hand or checked against it, for every n."""

from fractions import Fraction

import pytest

import topologies
from topologies import Topology

KS = (1, 2, 3, 4, 5)


def length(topology: Topology) -> int:
    assert topology.period is not None
    return topology.period


def digits(n: int, base: int) -> list[int]:
    """The digits of n, the lowest first."""
    return [n % base, *digits(n // base, base)] if n else []


def is_smooth(n: int, largest: int) -> bool:
    for factor in range(2, largest + 1):
        while n % factor == 0:
            n //= factor
    return n == 1


def blocks(n: int, k: int) -> list[list[range]]:
    """The sub-blocks of every block, the largest first."""
    found, start = [], 0
    for power, digit in reversed(list(enumerate(digits(n, k + 1)))):
        size = (k + 1) ** power
        if digit:
            found.append([range(start + i * size, start + (i + 1) * size) for i in range(digit)])
            start += digit * size
    return found


@pytest.mark.parametrize("k", KS)
def test_partners_are_distinct_and_one_in_every_sub_block(k: int) -> None:
    for n in (size for size in range(2, 131) if not is_smooth(size, k + 1)):
        parts = blocks(n, k)
        topology = topologies.build("simple_base", n, k=k)
        num_inner = len(digits(n, k + 1)) - 1 + (len(parts[0]) > 1)
        for j, sub_blocks in enumerate(parts[:-1]):
            round_ = topology.round(num_inner + j)
            later = range(sub_blocks[-1].stop, n)
            share = Fraction(len(sub_blocks) * len(sub_blocks[0]), n - sub_blocks[0].start)
            taken: list[int] = []
            for rank in later:
                row = round_.neighbours(rank)
                assert [sum(other in part for other in row) for part in sub_blocks] == [1] * len(sub_blocks)
                assert len(row) == len(sub_blocks)
                assert all(abs(w - float(share / len(sub_blocks))) <= 1e-15 for w in row.values())
                assert abs(round_.self_weight(rank) - float(1 - share)) <= 1e-15
                taken += row
            assert len(set(taken)) == len(taken)
            for rank in taken:
                assert len(round_.neighbours(rank)) == 1
                assert abs(round_.self_weight(rank) - float(1 - share / len(sub_blocks))) <= 1e-15
            free = {rank for part in sub_blocks for rank in part} - set(taken)
            for rank in free:
                group = {rank, *round_.neighbours(rank)}
                assert group <= free
                assert len(group) <= k + 1
                assert set(round_.neighbours(rank).values()) <= {1 / len(group)}
        # Outside of the exchanges the rounds are groups that average.
        for t in (*range(num_inner), *range(num_inner + len(parts) - 1, length(topology))):
            assert topology.round(t).uniform_groups is not None
