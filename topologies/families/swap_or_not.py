"""A shuffle of n cards that tells where one card lies without laying out the others."""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1


class SwapOrNotShuffle:
    """A random permutation of ``0 .. size - 1`` whose values are computed one at a time, in O(log n) steps.

    Step r has a random K_r: x and K_r - x mod n swap places if a pseudo-random bit of (r, the larger of the two)
    says so. 6 log2 n such steps mix all positions, and the same steps backwards undo them.

    Parameters
    ----------
    size
        Number of cards n, at least 1.
    generator
        Where the randomness is drawn from; the same state gives the same shuffle.

    References
    ----------
    Hoang, Morris and Rogaway, "An enciphering scheme based on a card shuffle", 2012, section 3.

    Examples
    --------
    >>> shuffle = SwapOrNotShuffle(10**12, np.random.default_rng(0))
    >>> shuffle.card_at(shuffle.place_of(123_456))
    123456
    """

    def __init__(self, size: int, generator: np.random.Generator) -> None:
        self.size = size
        num_steps = 6 * max(size.bit_length(), 4)
        sums = generator.integers(size, size=num_steps).tolist()
        keys = generator.integers(_MASK, size=num_steps, dtype=np.uint64, endpoint=True).tolist()
        self._steps: list[tuple[int, int]] = list(zip(sums, keys, strict=True))

    def place_of(self, card: int) -> int:
        """Return where a card lies after the shuffle."""
        for total, key in self._steps:
            card = self._step(card, total, key)
        return card

    def card_at(self, place: int) -> int:
        """Return which card lies at a place after the shuffle."""
        for total, key in reversed(self._steps):
            place = self._step(place, total, key)
        return place

    def _step(self, card: int, total: int, key: int) -> int:
        other = (total - card) % self.size
        return other if _bit(max(card, other) ^ key) else card


def _bit(number: int) -> int:
    """Return one bit that depends on all bits of a number: the finalizer of splitmix64 (Steele et al., 2014)."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return (number ^ (number >> 31)) & 1
