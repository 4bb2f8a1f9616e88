"""Topologies that are another one in disguise: the same rounds under another name, or with empty rounds in between."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import numpy as np

from topologies.family_registry import family
from topologies.matrix_storage import FloatArray
from topologies.topology import Topology

#: Exchanges that are compared of a schedule without a period, and rounds in which they are looked for.
_SAMPLED_EXCHANGES = 16
_SAMPLED_ROUNDS = 64

#: Fingerprints closer than this belong to the same round.
_SAME = 1e-9


def without_disguises(topologies: Iterable[Topology]) -> list[Topology]:
    """Return the topologies without those whose exchanges are another's, in the order given.

    Exchanges are the rounds in which something is sent. Where several topologies have the same ones in the same
    order, that one stays whose rounds are empty least often; of these the one whose options are nearest to their
    defaults, and fewest.

    Two rounds are the same if they map the same random vectors to the same values, which is found without comparing
    every weight; two that differ do so with probability 0. Of a schedule without a period 16 exchanges are compared.

    Examples
    --------
    >>> import topologies
    >>> complete, ring = topologies.build("complete", 4), topologies.build("ring", 4)
    >>> one_node = topologies.build("local_global", 4, local_size=4)  # complete in every other round
    >>> without_disguises([one_node, ring, complete])
    [Topology('ring', world_size=4, period=1), Topology('complete', world_size=4, period=1)]
    """
    candidates = list(topologies)
    described = [_Exchanges(topology) for topology in candidates]
    kept: list[int] = []
    for index in sorted(range(len(candidates)), key=lambda index: _plainness(candidates[index], described[index])):
        if not any(described[index].equal(described[other]) for other in kept):
            kept.append(index)
    return [candidates[index] for index in sorted(kept)]


class _Exchanges:
    """The rounds of a schedule in which something is sent, each by its fingerprint.

    Attributes
    ----------
    prints : ndarray, shape ``[exchanges, 2]``
        Of one period, of the shortest one that these exchanges have; or of the first 16.
    has_period : bool
    rounds_per_exchange : float
        Above 1 where some rounds are empty.
    """

    def __init__(self, topology: Topology) -> None:
        self.world_size, self.warmup = topology.world_size, topology.warmup
        self.has_period = topology.period is not None
        readers, senders = np.random.default_rng(0).normal(size=(2, topology.world_size, 2))
        num_rounds, found = 0, list[FloatArray]()
        for t in range(topology.warmup, topology.warmup + (topology.period or _SAMPLED_ROUNDS)):
            round_ = topology.round(t)
            num_rounds += 1
            if not round_.is_identity:
                found.append((readers * round_.mix(senders)).sum(axis=0))
            if not self.has_period and len(found) == _SAMPLED_EXCHANGES:
                break
        self.prints = np.array(found).reshape(-1, 2)
        self.rounds_per_exchange = num_rounds / len(found) if found else 1.0
        if self.has_period:
            self.prints = self.prints[: _shortest_period(self.prints)]

    def equal(self, other: _Exchanges) -> bool:
        """Whether both exchange the same, in the same order and forever, as far as both are known."""
        if self.world_size != other.world_size or self.warmup or other.warmup:
            return False  # what begins with a warm-up is a schedule of its own
        if self.has_period and other.has_period:
            return _same(self.prints, other.prints)
        if not (len(self.prints) and len(other.prints)):
            return False
        shown = max(len(schedule.prints) for schedule in (self, other) if not schedule.has_period)
        return _same(self._first(shown), other._first(shown))

    def _first(self, number: int) -> FloatArray:
        return self.prints[np.arange(number) % len(self.prints)] if self.has_period else self.prints[:number]


def _same(one: FloatArray, other: FloatArray) -> bool:
    return one.shape == other.shape and bool((np.abs(one - other) <= _SAME).all())


def _shortest_period(prints: FloatArray) -> int:
    """Return the smallest divisor of the number of exchanges after which they repeat."""
    length = len(prints)
    divisors = (period for period in range(1, length) if length % period == 0)
    return next((period for period in divisors if _same(prints[period:], prints[:-period])), length)


def _plainness(topology: Topology, exchanges: _Exchanges) -> tuple[float, int, int, str]:
    """Return what the plainest topology has the least of: empty rounds, options unlike their defaults, options."""
    parameters = inspect.signature(family(topology.name)).parameters if topology.registered else {}
    unlike_default = sum(
        name in parameters and parameters[name].default not in (inspect.Parameter.empty, value)
        for name, value in topology.options.items()
    )
    return exchanges.rounds_per_exchange, unlike_default, len(parameters), topology.name
