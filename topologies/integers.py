"""Factors and divisors of numbers of ranks, without a loop over all smaller ones."""

import math
from collections.abc import Sequence


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
