"""A schedule of rounds, as immutable data: what happens in round t, and of which phases it is made."""

from __future__ import annotations

import abc
import bisect
import functools
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NoReturn, Self, TypeVar, get_args

import numpy as np

from topologies.round import Round
from topologies.validation import SUM_TOLERANCE, Stochasticity, check_integer, check_world_size

#: Rounds kept after they were built; a longer schedule builds them again when it comes back to them.
_CACHED_ROUNDS = 64


ScheduleT = TypeVar("ScheduleT", bound="Schedule")


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A schedule of rounds for ``world_size`` ranks; round t follows from t alone, on every rank alike.

    It is the data of a :class:`Topology`, and all that is needed to exchange, compose and measure it.

    Parameters
    ----------
    world_size
        Number of ranks n.
    make_round
        Builds round t, for ``0 <= t < warmup + period`` (any t >= 0 if there is no period). Its result must depend
        on t alone. What it returns is checked when it is first used.
    period
        Number of rounds before the schedule repeats, once the warm-up is over; ``None`` if it never does.
    stochasticity
        "doubly": rows and columns of every W sum to 1, so the mean over ranks is kept. "row" or "column": only
        these do.
    promised_symmetric
        Whether every W is symmetric; ``None``: measured over a period when asked for. Without a period it
        must be promised to be believed.
    promised_exact_after
        If given, the promise that from a period boundary on the product of this many rounds is exactly
        J = 11^T / n. A period begins at round ``warmup`` and every ``period`` rounds later.
    name
        The registered name, or one of your choice.
    options
        What the family was built with, as plain data.
    """

    world_size: int
    make_round: Callable[[int], Round]
    period: int | None
    stochasticity: Stochasticity = "doubly"
    promised_symmetric: bool | None = None
    promised_exact_after: int | None = None
    name: str = "custom"
    options: Mapping[str, Any] = field(default_factory=dict)
    registered: bool = False
    _cache: dict[int, Round] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", plain_data(self.options))
        check_world_size(self.world_size)
        if self.stochasticity not in get_args(Stochasticity):
            raise ValueError(
                f"stochasticity must be one of {', '.join(map(repr, get_args(Stochasticity)))}, "
                f"got {self.stochasticity!r}; pass one of them"
            )
        if self.period is not None:
            check_integer("period", self.period, minimum=1)

    @classmethod
    def from_rounds(
        cls, rounds: Iterable[Round], *, stochasticity: Stochasticity = "doubly", name: str = "custom"
    ) -> Self:
        """Return the schedule that repeats the given rounds, at least one.

        The ValueError for a row or column that does not sum to 1 as ``stochasticity`` promises names the round, the row
        and the sum.
        """
        given = tuple(rounds) if isinstance(rounds, Iterable) else ()
        if not given or not all(isinstance(round_, Round) for round_ in given):
            raise TypeError(
                f"rounds must be a list of at least one Round, got {reprlib.repr(rounds)}; wrap a matrix in "
                f"Round.from_matrix"
            )
        schedule = cls(
            world_size=given[0].world_size,
            make_round=given.__getitem__,
            period=len(given),
            stochasticity=stochasticity,
            name=name,
        )
        for number, round_ in enumerate(given):
            schedule._check_round(round_, number)
        return schedule

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Round],
        *,
        seed: int | None = None,
        period: int | None = None,
        stochasticity: Stochasticity = "doubly",
        symmetric: bool | None = None,
        name: str = "custom",
    ) -> Self:
        """Return the schedule whose round t is computed by a function.

        Parameters
        ----------
        function
            ``function(t) -> Round``; with a ``seed`` it is called as ``function(t, generator)``. It must give
            the same round on every rank: use no other source of randomness than the generator.
        seed
            At least 0. The generator of round t is ``numpy.random.default_rng((seed, t))``: round t needs no
            earlier one.
        period
            Number of rounds before the schedule repeats; ``None``: it does not.
        stochasticity, symmetric
            What every round promises; a round that breaks a promise is refused when it is first used. Only those of
            :meth:`Round.from_formula` are taken on trust.
        name
            A name for reports.

        Examples
        --------
        >>> def shift(t):
        ...     return Round.from_rows([{(i + 1 + t) % 5: 0.5} for i in range(5)])
        >>> Schedule.from_function(shift, period=4).round(6).neighbours(0)
        {3: 0.5}
        """
        if not callable(function):
            raise TypeError(
                f"function must be a function of t that returns a Round, got {function!r} ({type(function).__name__})"
            )
        make_round = function
        if seed is not None:
            make_round = functools.partial(_seeded, function, check_integer("seed", seed, minimum=0))
        first = _is_round(make_round(0), 0)
        schedule = cls(
            world_size=first.world_size,
            make_round=make_round,
            period=period,
            stochasticity=stochasticity,
            promised_symmetric=symmetric,
            name=name,
        )
        schedule._check_round(first, 0)
        return schedule

    def round(self, t: int) -> Round:
        """Return round t >= 0, checked against what the schedule promises. No other round is built for it."""
        number = check_integer("t", t, minimum=0)
        if self.period is not None and number >= self.warmup:
            number = self.warmup + (number - self.warmup) % self.period
        round_ = self._cache.get(number)
        if round_ is None:
            round_ = _is_round(self.make_round(number), number)
            self._check_round(round_, number)
            if len(self._cache) >= _CACHED_ROUNDS:
                self._cache.clear()
            self._cache[number] = round_
        return round_

    @property
    def phases(self) -> tuple[Phase[Self], ...]:
        """The topologies that run one after the other: only itself, unless it was made by ``every`` or ``then``."""
        return self.make_round.phases if isinstance(self.make_round, Composition) else (Phase(self),)

    @property
    def warmup(self) -> int:
        """Number of rounds before the part that repeats begins; 0 unless it was made by :meth:`Topology.then`."""
        return self.phases[-1].start

    @property
    def doubly_stochastic(self) -> bool:
        """Whether the mean over ranks is kept: rows and columns of every W sum to 1."""
        return self.stochasticity == "doubly"

    @property
    def symmetric(self) -> bool:
        """Whether every W is symmetric. Without a period: only if that was promised."""
        if self.promised_symmetric is not None:
            return self.promised_symmetric
        if isinstance(self.make_round, Expression):
            return self.make_round.symmetric
        return self.period is not None and all(self.round(t).is_symmetric for t in range(self.period))

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same data; schedules from functions without a period equal only themselves."""
        if not isinstance(other, Schedule):
            return NotImplemented
        if self is other:
            return True
        if self._identity() != other._identity():
            return False
        if self.registered and other.registered:
            return True
        if isinstance(self.make_round, Expression) or isinstance(other.make_round, Expression):
            return bool(self.make_round == other.make_round)
        return self.period is not None and all(self.round(t) == other.round(t) for t in range(self.period))

    def __hash__(self) -> int:
        return hash((self.name, self.world_size, self.period))

    def __repr__(self) -> str:
        options = f"{text}, " if (text := options_text(self.options)) else ""
        warmup = f"warmup={self.warmup}, " if self.warmup else ""
        return (
            f"{type(self).__name__}({self.name!r}, world_size={self.world_size}, {options}{warmup}period={self.period})"
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle a schedule of rounds by its rounds, a composed one by its phases."""
        names = (field.name for field in fields(self) if field.init and field.name != "registered")
        given = {name: getattr(self, name) for name in names}
        return functools.partial(type(self), **given), ()

    def _identity(self) -> tuple[Any, ...]:
        options = dict(self.options) if self.registered else {}
        return self.name, self.world_size, self.period, self.stochasticity, self.registered, options

    def _check_round(self, round_: Round, number: int) -> None:
        where = f"round {number} of topology {self.name!r}"
        if round_.world_size != self.world_size:
            raise ValueError(
                f"{where} is for {round_.world_size} ranks, the topology for {self.world_size}; build all rounds "
                f"for the same world_size"
            )
        if round_.is_formula:
            return
        for kind, sums in (("row", round_.row_sums()), ("column", round_.column_sums())):
            wrong = ~(np.abs(sums - 1) <= SUM_TOLERANCE)
            if self.stochasticity in ("doubly", kind) and wrong.any():
                first = int(np.argmax(wrong))
                raise ValueError(
                    f"{where}: {kind} {first} of the mixing matrix sums to {float(sums[first])!r}, it must sum to 1 "
                    f"(within {SUM_TOLERANCE:g}), or the mean over ranks would drift. Scale its weights; or, if the "
                    f"algorithm corrects the bias, declare stochasticity={'column' if kind == 'row' else 'row'!r}."
                )
        if self.promised_symmetric and not self.registered and not round_.is_symmetric:
            raise ValueError(
                f"{where} is not symmetric, which was promised; make W[i, j] == W[j, i], or do not pass symmetric=True"
            )


@dataclass(frozen=True)
class Phase(Generic[ScheduleT]):
    """The part of a schedule in which one topology runs.

    Parameters
    ----------
    topology
        The topology whose rounds are exchanged; not itself made of phases.
    every
        Round s of the topology is round ``start + every * (s + 1) - 1`` of the schedule, after ``every - 1``
        identity rounds.
    start, stop
        The first round of the phase, and the first one after it; ``None``: it never ends.
    """

    topology: ScheduleT
    every: int = 1
    start: int = 0
    stop: int | None = None

    def number_of(self, exchange: int) -> int:
        """Return which round of the schedule the topology's round ``exchange`` is."""
        return self.start + self.every * (exchange + 1) - 1

    def num_distinct(self, *, sampled: int) -> int:
        """Return after how many exchanges they repeat or the phase ends; at most ``sampled`` without a period."""
        distinct = self.topology.period or sampled
        return distinct if self.stop is None else min(distinct, (self.stop - self.start) // self.every)


class Expression(abc.ABC):
    """The rule by which the rounds of a topology follow from those of others; the topology's ``make_round``.

    A subclass is a frozen dataclass of what it is made of: two expressions are equal if their parts are.
    """

    @property
    def parts(self) -> tuple[Schedule, ...]:
        """The topologies that it is made of."""
        return tuple(value for value in vars(self).values() if isinstance(value, Schedule))

    @property
    def symmetric(self) -> bool:
        """Whether every W is symmetric; without a period only if the parts promise it."""
        return all(part.symmetric for part in self.parts)

    @abc.abstractmethod
    def __call__(self, t: int) -> Round:
        """Return round t."""


@dataclass(frozen=True)
class Composition(Expression):
    """The rounds of phases that follow each other: the first one starts at round 0, only the last one never ends."""

    phases: tuple[Phase[Any], ...]

    @property
    def parts(self) -> tuple[Schedule, ...]:
        return tuple(phase.topology for phase in self.phases)

    def __call__(self, t: int) -> Round:
        phase = self.phases[bisect.bisect_right(self.phases, t, key=lambda phase: phase.start) - 1]
        exchange, local_steps = divmod(t - phase.start + 1, phase.every)
        return _identity(phase.topology.world_size) if local_steps else phase.topology.round(exchange - 1)


class FrozenDict(dict[str, Any]):
    """A dictionary that refuses to change; JSON, copies, pickles and comparisons take it for a dictionary."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a topology and its options are read-only; build another one with other options")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def plain_data(value: Any) -> Any:
    """Return read-only data that JSON can hold, with tuples for sequences; other objects are returned unchanged."""
    if isinstance(value, Mapping):
        return FrozenDict({str(key): plain_data(item) for key, item in value.items()})
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        return value.item()
    if isinstance(value, np.ndarray) or (isinstance(value, Sequence) and not isinstance(value, str | bytes)):
        return tuple(map(plain_data, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@functools.lru_cache
def _identity(world_size: int) -> Round:
    return Round.identity(world_size)


def _seeded(function: Callable[..., Round], seed: int, t: int) -> Round:
    """Call ``function(t, generator)`` with a generator that depends on (seed, t) alone."""
    return function(t, np.random.default_rng((seed, t)))


def check_schedule(argument: str, value: object, world_size: int | str = "world_size") -> None:
    if not isinstance(value, Schedule):
        raise TypeError(
            f"{argument} must be a Topology, got {value!r} ({type(value).__name__}); make one with "
            f"topologies.build(name, {world_size})"
        )


def _is_round(value: object, number: int) -> Round:
    if not isinstance(value, Round):
        raise TypeError(
            f"function must return a Round, got {type(value).__name__} for round {number}; wrap a matrix in "
            f"Round.from_matrix"
        )
    return value


def expression_text(topology: Schedule) -> str:
    """Return the topology's name, with its options in brackets."""
    options = options_text(topology.options) if topology.registered else ""
    return f"{topology.name}({options})" if options else topology.name


def title(name: str, options: Mapping[str, Any]) -> str:
    """Return the name, and the options in brackets if there are any."""
    text = options_text(options)
    return f"{name} ({text})" if text else name


def options_text(options: Mapping[str, Any]) -> str:
    """Return ``name=value, ..``; a graph is told by its numbers of nodes and edges, what is unset is left out.

    Examples
    --------
    >>> options_text({"factors": (2, 3), "shape": None, "probability": 1 / 3})
    'factors=(2, 3), probability=0.3333'
    """
    return ", ".join(f"{name}={_value_text(value)}" for name, value in options.items() if value is not None)


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{len(value.get('nodes', ()))} nodes and {len(value.get('edges', ()))} edges"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_no_warmup(operation: str, parts: Iterable[Schedule]) -> None:
    """Refuse parts that begin with a warm-up where only what repeats can be combined."""
    for part in parts:
        if part.warmup:
            raise ValueError(
                f"{operation} combines schedules that repeat, but {part.name!r} begins with a warm-up of "
                f"{part.warmup} rounds; combine first, and put then(..., after={part.warmup}) behind it"
            )


def common_stochasticity(parts: Iterable[Schedule]) -> Stochasticity:
    """Return what the rounds of all parts keep, if none is only row- and another one only column-stochastic."""
    weaker: dict[Stochasticity, str] = {part.stochasticity: part.name for part in parts}
    weaker.pop("doubly", None)
    if len(weaker) > 1:
        raise ValueError(
            f"topology {weaker['row']!r} is only row-stochastic and {weaker['column']!r} only column-stochastic: no "
            f"algorithm serves both; use doubly stochastic weights for one of them"
        )
    return next(iter(weaker), "doubly")
