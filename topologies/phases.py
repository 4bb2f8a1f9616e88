"""Topologies made of topologies: the phases of a schedule, and what every expression of topologies has."""

from __future__ import annotations

import abc
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from topologies.round import Round
from topologies.validation import Stochasticity

if TYPE_CHECKING:
    from topologies.topology import Topology


@dataclass(frozen=True)
class Phase:
    """The part of a schedule in which one topology runs.

    Parameters
    ----------
    topology
        The topology whose rounds are exchanged; not itself made of phases.
    every
        Round s of the topology is round ``start + every * (s + 1) - 1`` of the schedule, after ``every - 1``
        identity rounds.
    start
        The first round of the phase.
    stop
        The first round after it; ``None``: it never ends.
    """

    topology: Topology
    every: int = 1
    start: int = 0
    stop: int | None = None

    def number_of(self, exchange: int) -> int:
        """Return which round of the schedule the topology's round ``exchange`` is."""
        return self.start + self.every * (exchange + 1) - 1

    def num_distinct(self, *, sampled: int) -> int:
        """Return after how many exchanges they repeat or the phase ends.

        Parameters
        ----------
        sampled
            How many exchanges to count at most of a topology without a period.
        """
        distinct = self.topology.period or sampled
        return distinct if self.stop is None else min(distinct, (self.stop - self.start) // self.every)

    @property
    def symmetric(self) -> bool:
        """Whether every exchange of the phase is symmetric; without a period only if the topology promises it."""
        num_exchanges = self.num_distinct(sampled=1)
        if self.topology.symmetric or not num_exchanges:
            return True
        period = self.topology.period
        if period is None or num_exchanges == period:
            return False
        return all(self.topology.round(exchange).is_symmetric for exchange in range(num_exchanges))


class Expression(abc.ABC):
    """The rule by which the rounds of a topology follow from those of others; the topology's ``make_round``.

    A subclass is a frozen dataclass of what it is made of: two expressions are equal if their parts are.
    """

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[Topology, ...]:
        """The topologies that it is made of."""

    @abc.abstractmethod
    def __call__(self, t: int) -> Round:
        """Return round t."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that follow each other; empty: the schedule is one phase."""
        return ()

    @property
    def symmetric(self) -> bool:
        """Whether every W is symmetric; without a period only if the parts promise it."""
        return all(part.symmetric for part in self.parts)


def expression_text(topology: Topology) -> str:
    """Return the topology's name, with its options in brackets."""
    options = brief_options(topology.options) if topology.registered else ""
    return f"{topology.name}({options})" if options else topology.name


def brief_options(options: Mapping[str, Any]) -> str:
    """Return ``name=value, ...`` with long values cut and mappings, such as a graph, left out."""
    return ", ".join(
        f"{name}={'{...}' if isinstance(value, Mapping) else reprlib.repr(value)}" for name, value in options.items()
    )


def check_no_warmup(operation: str, parts: Iterable[Topology]) -> None:
    """Refuse parts that begin with a warm-up where only what repeats can be combined."""
    for part in parts:
        if part.warmup:
            raise ValueError(
                f"{operation} combines schedules that repeat, but {part.name!r} begins with a warm-up of "
                f"{part.warmup} rounds; combine first, and put then(..., after={part.warmup}) behind it"
            )


def common_stochasticity(parts: Iterable[Topology]) -> Stochasticity:
    """Return what the rounds of all parts keep: "doubly", "row" or "column".

    Raises
    ------
    ValueError
        If one part is only row- and another only column-stochastic.
    """
    weaker: dict[Stochasticity, str] = {part.stochasticity: part.name for part in parts}
    weaker.pop("doubly", None)
    if len(weaker) > 1:
        raise ValueError(
            f"topology {weaker['row']!r} is only row-stochastic and {weaker['column']!r} only column-stochastic: no "
            f"algorithm serves both; use doubly stochastic weights for one of them"
        )
    return next(iter(weaker), "doubly")
