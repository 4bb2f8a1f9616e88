"""Families of uniform groups that average exactly within a period."""

import functools
import math
from collections.abc import Sequence

import numpy as np

from topologies.round import Round
from topologies.topology import Topology, register
from topologies.validation import (
    MAX_WORLD_SIZE,
    check_integer,
    check_served,
    check_stored,
    divisors,
    is_power_of_two,
    is_prime,
    listed,
    powers,
    prime_factors,
)

#: Numbers without a larger prime factor are so rare that all are listed, 400,000 below 2^32.
_MOST_ENUMERATED = 31


@register("hyper_cuboid", variants=lambda world_size, _: [{"factors": prime_factors(world_size)}])
def hyper_cuboid(world_size: int, *, factors: Sequence[int]) -> Topology:
    """Ranks as the points of a box with sides f_0, f_1, ..; round l averages along side l, weights 1/f_l.

    Rank = d_0 + f_0 (d_1 + f_1 (d_2 + ..)) in mixed radix, digit d_0 first: ranks that differ in digit l alone
    are a group of round l.

    Properties
    ----------
    sizes : the product of the factors
    degree : f_l - 1 in round l
    period : one round per factor
    exact : after one round per factor
    rate : beta 0 after a period
    weights : 1/f_l, symmetric, uniform groups

    Parameters
    ----------
    factors
        Sides of the box, their product is ``world_size``. A side of 1 is an identity round.

    References
    ----------
    Liu et al., "Clique gossiping", 2017.
    Ryabinin et al., "Moshpit SGD: communication-efficient decentralized training on heterogeneous unreliable devices",
    2021, section 3.2.

    Examples
    --------
    >>> topologies.build("hyper_cuboid", 6, factors=(2, 3)).round(1).groups
    ((0, 2, 4), (1, 3, 5))
    """
    if not isinstance(factors, tuple) or not factors:
        raise TypeError(
            f"factors of topology 'hyper_cuboid' must be a list of at least one integer, got {factors!r}; for "
            f"world_size {world_size} use for example {list(prime_factors(world_size))}"
        )
    sides = tuple(check_integer("a factor in factors", factor, minimum=1) for factor in factors)
    if math.prod(sides) != world_size:
        raise ValueError(
            f"factors {sides} of topology 'hyper_cuboid' multiply to {math.prod(sides)}, world_size is "
            f"{world_size}; use factors of {world_size}, such as {prime_factors(world_size)}, or world_size "
            f"{math.prod(sides)}"
        )
    last_mixing = max(index for index, side in enumerate(sides) if side > 1)

    def along_side(index: int) -> Round:
        return strided_groups(world_size, math.prod(sides[:index]), sides[index])

    return Topology(world_size, along_side, len(sides), promised_exact_after=last_mixing + 1)


@register("hyper_hypercube", variants=lambda *_: [{"k": k} for k in (1, 2, 3, 4)])
def hyper_hypercube(world_size: int, *, k: int) -> Topology:
    """The box of hyper_cuboid with the fewest sides of at most k + 1, largest first: at most k peers per round.

    Round l averages groups of f_l ranks, where n = f_0 f_1 .. has the fewest factors f_l <= k + 1. Among equally few
    the largest is as small as possible.

    Properties
    ----------
    sizes : n without prime factors above k + 1
    degree : at most k
    period : the fewest factors of n, each at most k + 1
    exact : after a period
    rate : beta 0 after a period
    weights : 1/f_l, symmetric, uniform groups

    Parameters
    ----------
    k
        Largest number of peers, at least 1. ``world_size`` must have no prime factor above k + 1.

    References
    ----------
    Takezawa et al., "Beyond exponential graph: communication-efficient topologies for decentralized learning via
    finite-time convergence", 2023, Algorithm 1.

    Examples
    --------
    >>> topologies.build("hyper_hypercube", 12, k=3).describe().exact_after
    2
    """
    k = check_integer("k", k, minimum=1)
    needed = prime_factors(world_size)[-1] - 1
    if k < needed:
        check_served(
            "hyper_hypercube",
            world_size,
            f"a product of factors of at most k + 1 = {k + 1}",
            lambda size: _is_smooth(size, k + 1),
            sparse=_smooth_numbers(k + 1 if k < _MOST_ENUMERATED else 2, 2 * world_size),
            advice=f"Choose one of these, or k of at least {needed} for {world_size} ranks.",
        )
    return hyper_cuboid(world_size, factors=fewest_factors(world_size, k + 1))


@register("local_global", variants=lambda world_size, local_size: _node_sizes(world_size, local_size))
def local_global(world_size: int, *, local_size: int) -> Topology:
    """Average inside every node, then across the nodes: a hyper_cuboid of (local_size, n / local_size).

    Node m holds the ranks m L .. m L + L - 1 with L = local_size. In the second round equal local ranks of all nodes
    are a group. It is the hierarchical averaging of Bluefog.

    Properties
    ----------
    sizes : multiples of L = local_size
    degree : L - 1 and n/L - 1 in turn
    period : 2
    exact : after 2 rounds (1 for L = n)
    rate : beta 0 after a period
    weights : 1/L and L/n in turn, symmetric, uniform groups

    Parameters
    ----------
    local_size
        Ranks per node L; divides ``world_size``.

    References
    ----------
    Ryabinin et al., "Moshpit SGD: communication-efficient decentralized training on heterogeneous unreliable devices",
    2021, section 3.2.
    Ying et al., "BlueFog: make decentralized algorithms practical for optimization and deep learning", 2021.

    Examples
    --------
    >>> [topologies.build("local_global", 6, local_size=3).round(t).groups for t in range(2)]
    [((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5))]
    """
    local_size = check_integer("local_size", local_size, minimum=1)
    check_served(
        "local_global",
        world_size,
        f"a multiple of local_size = {local_size}",
        lambda size: size % local_size == 0,
        sparse=(world_size // local_size * local_size, (world_size // local_size + 1) * local_size),
        advice=f"Choose one of these, or for {world_size} ranks a local_size out of [{listed(divisors(world_size))}].",
    )
    return hyper_cuboid(world_size, factors=(local_size, world_size // local_size))


@register("alternating_exp_ring", variants=lambda world_size, local_size: _node_sizes(world_size, local_size))
def alternating_exp_ring(world_size: int, *, local_size: int) -> Topology:
    """Pairs of nodes at distance 2^i average, half of the pairs inside their nodes while the others use the network.

    There are m = n / L = 2^k nodes of L ranks. Hop i = 0 .. k-1 has the rounds 2i and 2i + 1 and pairs node j with
    node j + 2^i, walking the unmatched nodes upwards. The pairs are numbered through all hops. An even pair
    averages inside each of its two nodes in round 2i and over all its 2L ranks in round 2i + 1, an odd pair the
    other way round. Either way it holds the mean of its 2L ranks after both, so a period is exact.

    Properties
    ----------
    sizes : n = L 2^k, k >= 1, L = local_size
    degree : at most 2L - 1
    period : 2k
    exact : after 2k rounds
    rate : beta 0 after a period
    weights : 1/L and 1/(2L), symmetric, uniform groups

    Parameters
    ----------
    local_size
        Ranks per node L. ``world_size / local_size`` is a power of two, at least 2.

    References
    ----------
    Wang et al., "From promise to practice: realizing high-performance decentralized training" (Decent-DP), 2025.

    Examples
    --------
    >>> topologies.build("alternating_exp_ring", 8, local_size=2).round(0).groups
    ((0, 1), (2, 3), (4, 5, 6, 7))
    """
    local_size = check_integer("local_size", local_size, minimum=1)

    def serves(size: int) -> bool:
        num_nodes, rest = divmod(size, local_size)
        return not rest and num_nodes >= 2 and is_power_of_two(num_nodes)

    check_served(
        "alternating_exp_ring",
        world_size,
        f"local_size = {local_size} times a power of two, at least {2 * local_size}",
        serves,
        sparse=[local_size * power for power in powers(2, MAX_WORLD_SIZE // local_size)],
    )
    check_stored("alternating_exp_ring", world_size, float(world_size))
    num_nodes = world_size // local_size
    num_hops = num_nodes.bit_length() - 1

    def pairs_at(t: int) -> Round:
        hop, second = divmod(t, 2)
        groups: list[range | tuple[int, ...]] = []
        # The walk's pairs begin at the nodes without bit ``hop``.
        first_nodes = (node for node in range(num_nodes) if not node >> hop & 1)
        for number, one in enumerate(first_nodes, start=hop * num_nodes // 2):
            nodes = [range(node * local_size, (node + 1) * local_size) for node in (one, one + (1 << hop))]
            if number % 2 == second:
                groups.extend(nodes)
            else:
                groups.append((*nodes[0], *nodes[1]))
        return Round.from_groups(world_size, groups)

    return Topology(world_size, pairs_at, 2 * num_hops, promised_exact_after=2 * num_hops)


def strided_groups(world_size: int, stride: int, size: int) -> Round:
    """Return the round whose groups are ``size`` ranks at distances of ``stride``; the two multiply to a divisor of n.

    In mixed radix these are the ranks that differ in one digit, of place value ``stride``, alone.
    """

    def row(rank: int) -> dict[int, float]:
        first = rank - rank // stride % size * stride
        return dict.fromkeys(range(first, first + size * stride, stride), 1.0 / size)

    def whole() -> Round:
        groups = np.arange(world_size).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)
        return Round.from_groups(world_size, groups.tolist())

    return Round.from_formula(world_size, row, whole=whole)


def _node_sizes(world_size: int, local_size: int) -> list[dict[str, int]]:
    """Return the ranks per node to try: those of the machines, or else as many as there are nodes, about."""
    if local_size > 1:
        return [{"local_size": local_size}]
    return [{"local_size": max(size for size in divisors(world_size) if size * size <= world_size)}]


def fewest_factors(number: int, largest: int) -> tuple[int, ...]:
    """Return the fewest factors, falling and at most ``largest``, of a number without a larger prime factor.

    Ties go to the smallest largest factor, then to the smallest second, and so on: (6, 4) for 24 and at most 6.
    """
    choices = (_factors(number, largest, num_factors) for num_factors in range(1, number.bit_length()))
    # At the latest, all prime factors.
    return next(factors for factors in choices if factors is not None) if number > 1 else ()


@functools.lru_cache(maxsize=4096)
def _factors(number: int, largest: int, num_factors: int) -> tuple[int, ...] | None:
    """Return ``num_factors`` falling factors of at most ``largest``, those first that are smaller, or ``None``."""
    if num_factors == 1:
        return (number,) if number <= largest else None
    for factor in divisors(number):
        if factor <= largest and factor**num_factors >= number:
            rest = _factors(number // factor, factor, num_factors - 1)
            if rest is not None:
                return (factor, *rest)
    return None


def _is_smooth(number: int, largest: int) -> bool:
    """Whether a number has no prime factor above ``largest``."""
    for factor in range(2, largest + 1):
        if factor * factor > number:
            break
        while number % factor == 0:
            number //= factor
    return number <= largest


def _smooth_numbers(largest: int, limit: int) -> list[int]:
    """Return all numbers up to a limit without a prime factor above ``largest``."""
    found = [1]
    for prime in filter(is_prime, range(2, largest + 1)):
        found = [size * power for size in found for power in powers(prime, limit // size)]
    return found
