"""Base-(k+1) graphs: exact averaging for any number of ranks, with at most k peers in a round."""

import functools
import math
from bisect import bisect_right
from dataclasses import dataclass

from topologies.families.uniform_groups import fewest_factors, hyper_hypercube, strided_groups
from topologies.round import Round
from topologies.topology import Topology, register
from topologies.validation import check_integer, powers, prime_factors


@register("simple_base", variants=lambda *_: [{"k": k} for k in (1, 2, 3)])
def simple_base(world_size: int, *, k: int = 1) -> Topology:
    """Blocks after the digits of n in base k + 1 average inside, then bring in one another: exact for any n.

    With b = k + 1, n = sum_l a_l b^p_l for p_1 > p_2 > ... > p_L and 1 <= a_l <= k. Block l is the next a_l b^p_l
    ranks, a_l sub-blocks of b^p_l. Rounds:

    1. p_1 + [a_1 > 1] rounds: every block averages by hyper_hypercube, shorter ones repeat.
    2. One round for each j = 1 .. L - 1: rank number i of the blocks after block j takes rank number i of each
       sub-block of block j as partner, weight b^p_j / (ranks of block j and later ones). Ranks of block j without a
       partner average in groups of at most b.
    3. From the round after its own exchange on, every block averages inside its sub-blocks by hyper_hypercube.

    If n has no prime factor above b it is hyper_hypercube.

    Properties
    ----------
    sizes : any n
    degree : at most k
    period : 2 p_1 + 1 + [a_1 > 1], p_1 = floor(log_b n), a_1 the first digit; fewest factors if n is smooth
    exact : after a period, from a period boundary
    rate : beta 0 after a period
    weights : by block sizes, symmetric, doubly stochastic

    Parameters
    ----------
    k
        Largest number of peers in a round, at least 1. 1: pairs with unequal weights; from 2 on: stars.

    References
    ----------
    Takezawa et al., "Beyond exponential graph: communication-efficient topologies for decentralized learning via
    finite-time convergence", 2023, Algorithm 2.

    Examples
    --------
    >>> topologies.build("simple_base", 5).round(2).neighbours(4)
    {0: 0.8}
    """
    base = check_integer("k", k, minimum=1) + 1
    if _smooth_part(world_size, base) == world_size:
        return hyper_hypercube(world_size, k=k)
    schedule = _Schedule(world_size, base)

    def make_round(t: int) -> Round:
        return Round.from_formula(world_size, functools.partial(schedule.row, t))

    return Topology(
        world_size, make_round, schedule.length, promised_symmetric=True, promised_exact_after=schedule.length
    )


@register("base", variants=lambda *_: [{"k": k} for k in (1, 2, 3)])
def base(world_size: int, *, k: int = 1) -> Topology:
    """Copies of a smaller simple_base average inside, then by hyper_hypercube across: exact for any n.

    n = p q, where p has the prime factors of n up to k + 1. The p copies, of q consecutive ranks each, run
    simple_base(q); then equal places of all copies run hyper_hypercube(p). Where this is no shorter than
    simple_base(n) it is that.

    Properties
    ----------
    sizes : any n
    degree : at most k
    period : the shorter of simple_base(n) and simple_base(q) plus hyper_hypercube(p)
    exact : after a period, from a period boundary
    rate : beta 0 after a period
    weights : by block sizes, symmetric, doubly stochastic

    Parameters
    ----------
    k
        Largest number of peers in a round, at least 1. 1: pairs with unequal weights; from 2 on: stars.

    References
    ----------
    Takezawa et al., "Beyond exponential graph: communication-efficient topologies for decentralized learning via
    finite-time convergence", 2023, Algorithm 3.

    Examples
    --------
    >>> [topologies.build(name, 6).period for name in ("base", "simple_base")]
    [4, 5]
    """
    simple = simple_base(world_size, k=k)
    num_copies = _smooth_part(world_size, k + 1)
    size = world_size // num_copies
    sides = fewest_factors(num_copies, k + 1)
    inside = _Schedule(size, k + 1)
    length = inside.length + len(sides)
    assert simple.period is not None
    if simple.period <= length:
        return simple

    def make_round(t: int) -> Round:
        if t >= inside.length:
            side = t - inside.length
            return strided_groups(world_size, size * math.prod(sides[:side]), sides[side])

        def row(rank: int) -> dict[int, float]:
            first = rank - rank % size
            return {first + other: weight for other, weight in inside.row(t, rank - first).items()}

        return Round.from_formula(world_size, row)

    return Topology(world_size, make_round, length, promised_symmetric=True, promised_exact_after=length)


@dataclass(frozen=True)
class _Block:
    """The ranks from ``start`` on that belong to one digit: ``count`` sub-blocks of ``size`` ranks.

    ``sides`` are those of the box of all its ranks, ``sub_sides`` those of a sub-block's.
    """

    start: int
    size: int
    count: int
    base: int
    sides: tuple[int, ...]
    sub_sides: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.size * self.count

    def mean(self, rank: int, sides: tuple[int, ...], side: int) -> dict[int, float]:
        """Return the row of a rank that averages along a side of its box."""
        stride, size = math.prod(sides[:side]), sides[side]
        first = rank - (rank - self.start) // stride % size * stride
        return dict.fromkeys(range(first, first + size * stride, stride), 1.0 / size)

    def exchange(self, rank: int, num_later: int) -> dict[int, float]:
        """Return the row of a rank of this block when the ``num_later`` ranks behind it take their partners."""
        sub_block, offset = divmod(rank - self.start, self.size)
        if offset < num_later:
            return {rank: 1.0 - self.weight(num_later), self.stop + offset: self.weight(num_later)}
        # Those without a partner, counted across the sub-blocks: a later round averages within them.
        place = (offset - num_later) * self.count + sub_block
        first = place - place % self.base
        last = min(first + self.base, (self.size - num_later) * self.count)
        members = sorted(
            self.start + place % self.count * self.size + num_later + place // self.count
            for place in range(first, last)
        )
        return dict.fromkeys(members, 1.0 / len(members))

    def partners(self, rank: int, num_later: int) -> dict[int, float]:
        """Return the row of one of the ``num_later`` ranks behind this block: one partner in every sub-block."""
        first = self.start + rank - self.stop
        return dict.fromkeys(range(first, first + self.size * self.count, self.size), self.weight(num_later))

    def weight(self, num_later: int) -> float:
        return self.size / (self.size * self.count + num_later)


class _Schedule:
    """The rounds of simple_base for a number of ranks with a prime factor above ``base``."""

    def __init__(self, world_size: int, base: int) -> None:
        self.world_size = world_size
        self.blocks = _blocks(world_size, base)
        self.starts = [block.start for block in self.blocks]
        self.num_inner = len(self.blocks[0].sides)
        self.length = self.num_inner + 1 + len(self.blocks[0].sub_sides)

    def row(self, t: int, rank: int) -> dict[int, float]:
        """Return ``{j: W[rank, j]}`` of round t by rising j."""
        number = bisect_right(self.starts, rank) - 1
        block = self.blocks[number]
        if t < self.num_inner:
            return block.mean(rank, block.sides, t % len(block.sides)) if block.sides else {}
        exchange = t - self.num_inner
        if exchange < number:
            other = self.blocks[exchange]
            return other.partners(rank, self.world_size - other.stop)
        if block is self.blocks[-1]:
            side = exchange - number
        elif exchange == number:
            return block.exchange(rank, self.world_size - block.stop)
        else:
            side = exchange - number - 1
        return block.mean(rank, block.sub_sides, side) if side < len(block.sub_sides) else {}


def _blocks(world_size: int, base: int) -> list[_Block]:
    """Return one block per digit of the number of ranks that is not 0, the highest first."""
    blocks = []
    start = 0
    for size in reversed(powers(base, world_size)):
        if count := (world_size - start) // size:
            sides = fewest_factors(size * count, base), fewest_factors(size, base)
            blocks.append(_Block(start, size, count, base, *sides))
            start = blocks[-1].stop
    return blocks


def _smooth_part(number: int, largest: int) -> int:
    """Return the largest divisor of ``number`` without a prime factor above ``largest``."""
    return math.prod(factor for factor in prime_factors(number) if factor <= largest)
