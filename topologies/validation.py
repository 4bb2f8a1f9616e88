"""Checks of what a user gives, and the errors that say what would be accepted instead.

For these, factors and divisors of numbers of ranks are found without a loop over all smaller ones.
"""

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

Stochasticity = Literal["doubly", "row", "column"]

#: Largest deviation of a row or column sum from 1 that is put down to rounding. The mean over ranks then drifts
#: by less than 1e-4 of its size in a million rounds.
SUM_TOLERANCE = 1e-10

#: More ranks than any cluster has, and few enough that products of two of them are 64-bit integers.
MAX_WORLD_SIZE = 1 << 31

#: Most entries of a round's matrix, or ranks in its groups, that a family writes down: seconds, under a gigabyte.
MAX_STORED = 10**7

#: Of more ranks nothing is measured: a round that is a formula would be written down, with all its powers.
MAX_MEASURED_WORLD_SIZE = 10**6

#: How far from a size that is not served all others are tried.
_WINDOW = 4096


def prime_factors(number: int) -> tuple[int, ...]:
    """Return the prime factors in rising order; ``(1,)`` for 1."""
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1 or not factors:
        factors.append(number)
    return tuple(factors)


def is_prime(number: int) -> bool:
    """Whether a number is a prime; quick for one with a small divisor."""
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def is_power_of_two(number: int) -> bool:
    """Whether a number of at least 1 is a power of two; 1 is one."""
    return not number & (number - 1)


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors in rising order, 1 and the number itself included."""
    found = {1}
    for prime in prime_factors(number):
        found |= {prime * divisor for divisor in found}
    return tuple(sorted(found))


def powers(base: int, largest: int) -> tuple[int, ...]:
    """Return 1, base, base^2, .. up to ``largest``."""
    found = [1]
    while found[-1] * base <= largest:
        found.append(found[-1] * base)
    return tuple(found)


def listed(values: Sequence[object], most: int = 12) -> str:
    """Return a list as text for an error, of a long one its beginning and its last item: "0, 1, 2, .., 99"."""
    text = ", ".join(map(str, values[:most]))
    return f"{text}, .., {values[-1]}" if len(values) > most else text


def check_integer(argument: str, value: object, *, minimum: int, maximum: int | None = None) -> int:
    """Return ``value`` as an ``int`` of at least ``minimum`` and at most ``maximum``; a ``bool`` is none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{argument} must be an integer of at least {minimum}, got {value!r} ({type(value).__name__}); "
            f"pass a plain int"
        ) from None
    if number < minimum:
        raise ValueError(f"{argument} must be at least {minimum}, got {number}; pass {minimum} or more")
    if maximum is not None and number > maximum:
        given = number if number.bit_length() < 100 else f"a number of {number.bit_length()} bits"
        raise ValueError(f"{argument} must be at most {maximum}, got {given}; pass {maximum} or less")
    return number


#: The intervals that real numbers are asked to lie in, in words.
_INTERVALS: dict[str, Callable[[float], bool]] = {
    "between 0 and 1": lambda number: 0.0 <= number <= 1.0,
    "between 0 and 1, both excluded": lambda number: 0.0 < number < 1.0,
    "above 0 and at most 1": lambda number: 0.0 < number <= 1.0,
    "at least 0 and below 1": lambda number: 0.0 <= number < 1.0,
    "above 0": lambda number: number > 0.0,
    "above 0 and finite": lambda number: 0.0 < number < math.inf,
    "at least 0 and finite": lambda number: 0.0 <= number < math.inf,
    "at least 1 and finite": lambda number: 1.0 <= number < math.inf,
    "finite": math.isfinite,
}


def check_real(argument: str, value: object, allowed: str, *, example: float) -> float:
    """Return ``value`` as a float of the interval ``allowed``, one of the keys of ``_INTERVALS``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{argument} must be a number, {allowed}, got {value!r} ({type(value).__name__}); pass for example "
            f"{example}"
        )
    if not _INTERVALS[allowed](float(value)):
        raise ValueError(f"{argument} must be {allowed}, got {value!r}; pass for example {example}")
    return float(value)


def check_world_size(world_size: object) -> int:
    """Return ``world_size`` as an ``int`` of at least 1 and at most :data:`MAX_WORLD_SIZE`."""
    return check_integer("world_size", world_size, minimum=1, maximum=MAX_WORLD_SIZE)


def check_local_size(local_size: object, world_size: int) -> int:
    """Return the ranks per node, or per group, which divide the world size."""
    local_size = check_integer("local_size", local_size, minimum=1)
    if world_size % local_size:
        raise ValueError(
            f"local_size must divide world_size {world_size}, got {local_size}; use one of "
            f"{listed(divisors(world_size))}"
        )
    return local_size


def check_stored(family: str, world_size: int, size: float, *, most: int = MAX_STORED, advice: str = "") -> None:
    """Refuse a world size for which a family would have to store too much; called before anything is allocated.

    ``size`` are the edges of a round, or the ranks in its groups, about, of which ``most`` are served; ``advice`` is
    what else the user can change, as part of a sentence: "or a smaller degree".
    """
    if size > most:
        raise ValueError(
            f"topology {family!r} stores a whole round, and serves at most {most} edges or members of groups in it; "
            f"for a world_size of {world_size} there are about {size:.2g}. Choose a smaller world_size"
            f"{advice and f' {advice}'}, or a family of formulas, which serves any size: ring, exponential, "
            f"one_peer_exponential, simple_base or equi_dyn"
        )


def check_measured_size(world_size: int) -> None:
    """Refuse to measure topologies of more ranks than can be written down in a reasonable time."""
    if world_size > MAX_MEASURED_WORLD_SIZE:
        raise ValueError(
            f"world_size must be at most {MAX_MEASURED_WORLD_SIZE} to be measured, which looks at every rank, got "
            f"{world_size}; measure the family for fewer ranks, or ask topology.round(t).row(rank) for one rank"
        )


def check_served(
    family: str,
    world_size: int,
    rule: str,
    serves: Callable[[int], bool],
    *,
    sparse: Iterable[int] = powers(2, MAX_WORLD_SIZE),
    advice: str = "",
) -> None:
    """Refuse a world size that a family cannot serve; the error names the nearest sizes that it can.

    ``rule`` says in words which sizes ``serves`` is true for: "a power of two". ``sparse`` are the sizes to try if none
    within 4096 of ``world_size`` is served. ``advice`` is what else the user can change, as a full sentence.
    """
    if serves(world_size):
        return
    others = sorted(size for size in sparse if 1 < size <= MAX_WORLD_SIZE)
    lower = (*range(world_size - 1, max(world_size - _WINDOW, 1), -1), *reversed(others))
    upper = (*range(world_size + 1, min(world_size + _WINDOW, MAX_WORLD_SIZE) + 1), *others)
    below = next((size for size in lower if size < world_size and serves(size)), 1)
    above = next((size for size in upper if size > world_size and serves(size)), None)
    nearest = f"the nearest is {below}" if above is None else f"the nearest are {below} and {above}"
    chosen = "it" if above is None else "one of these"
    raise ValueError(
        f"topology {family!r} needs a world_size that is {rule}, got {world_size}; {nearest}. "
        f"{advice or f'Choose {chosen}, or a family for any size, such as one_peer_exponential.'}"
    )
