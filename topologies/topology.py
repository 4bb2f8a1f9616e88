"""A topology: a schedule of rounds, as immutable data that needs no cluster."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from topologies.functions import Seeded, check_is_round
from topologies.phases import Expression, Phase, brief_options
from topologies.plain_data import frozen
from topologies.round import Round
from topologies.validation import (
    Stochasticity,
    check_integer,
    check_stochasticity,
    check_sums,
    check_world_size,
)

if TYPE_CHECKING:
    import networkx as nx

    from topologies.analysis.description import Description

#: Rounds kept after they were built; a longer schedule builds them again when it comes back to them.
_CACHED_ROUNDS = 64


@dataclass(frozen=True, eq=False, repr=False)
class Topology:
    """A schedule of rounds for ``world_size`` ranks; round t follows from t alone, on every rank alike.

    Use :func:`topologies.build` for a registered family, or :meth:`from_graph`, :meth:`from_rounds` and
    :meth:`from_function` for one of your own. The constructor is for families.

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

    Examples
    --------
    >>> import topologies
    >>> ring = topologies.build("ring", 8)
    >>> ring.round(3).neighbours(0)
    {1: 0.3333333333333333, 7: 0.3333333333333333}
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
        object.__setattr__(
            self, "options", MappingProxyType({key: frozen(value) for key, value in self.options.items()})
        )
        check_world_size(self.world_size)
        check_stochasticity(self.stochasticity)
        if self.period is not None:
            check_integer("period", self.period, minimum=1)

    @classmethod
    def from_graph(
        cls, graph: nx.Graph | str | os.PathLike[str] | Mapping[str, Any], weights: str = "metropolis"
    ) -> Topology:
        """Return the topology that exchanges along a graph in every round.

        The graph is a networkx graph, node-link data or a file. The same as ``build("graph", n, graph=graph,
        weights=weights)`` for a graph of n nodes, see :func:`topologies.families.given_graph.graph`.
        """
        from topologies.graphs.graph_files import read_graph
        from topologies.registry import build  # the registry builds topologies: it cannot come first

        graph = read_graph(graph)
        return build("graph", len(graph), graph=graph, weights=weights)

    @classmethod
    def from_rounds(
        cls, rounds: Iterable[Round], *, stochasticity: Stochasticity = "doubly", name: str = "custom"
    ) -> Topology:
        """Return the topology that repeats the given rounds.

        Raises
        ------
        ValueError
            If there are none, their sizes differ, or a row or column does not sum to 1 as ``stochasticity``
            promises. The error names the round, the row and the sum.
        """
        if isinstance(rounds, Round) or not isinstance(rounds, Iterable):
            raise TypeError(
                f"rounds must be a list of at least one Round, got a {type(rounds).__name__}; pass [round_]"
            )
        given = tuple(rounds)
        if not given:
            raise ValueError("rounds is empty; pass at least one Round, such as Round.identity(world_size)")
        for number, round_ in enumerate(given):
            if not isinstance(round_, Round):
                raise TypeError(
                    f"rounds[{number}] is a {type(round_).__name__}, not a Round; wrap a matrix in Round.from_matrix"
                )
        topology = cls(
            world_size=given[0].world_size,
            make_round=given.__getitem__,
            period=len(given),
            stochasticity=stochasticity,
            name=name,
        )
        for number, round_ in enumerate(given):
            topology._check_round(round_, number)
        return topology

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
    ) -> Topology:
        """Return the topology whose round t is computed by a function.

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

        Raises
        ------
        ValueError
            If round 0 breaks a promise; later rounds are checked when they are first used. A round from
            :meth:`Round.from_formula` is trusted: return one from ``from_rows`` or ``from_edges`` to have it checked.

        Examples
        --------
        >>> def shift(t):
        ...     return Round.from_rows([{(i + 1 + t) % 5: 0.5} for i in range(5)])
        >>> Topology.from_function(shift, period=4).round(6).neighbours(0)
        {3: 0.5}
        """
        if not callable(function):
            raise TypeError(
                f"function must be a function of t that returns a Round, got {function!r} ({type(function).__name__})"
            )
        make_round = function if seed is None else Seeded(function, check_integer("seed", seed, minimum=0))
        first = make_round(0)
        check_is_round(first, 0)
        topology = cls(
            world_size=first.world_size,
            make_round=make_round,
            period=period,
            stochasticity=stochasticity,
            promised_symmetric=symmetric,
            name=name,
        )
        topology._check_round(first, 0)
        return topology

    def round(self, t: int) -> Round:
        """Return round t >= 0. No other round is built for it.

        Raises
        ------
        ValueError
            If t is negative, or round t is of another size or its matrix breaks the declared stochasticity.
        """
        number = check_integer("t", t, minimum=0)
        if self.period is not None and number >= self.warmup:
            number = self.warmup + (number - self.warmup) % self.period
        round_ = self._cache.get(number)
        if round_ is None:
            round_ = self.make_round(number)
            check_is_round(round_, number)
            self._check_round(round_, number)
            if len(self._cache) >= _CACHED_ROUNDS:
                self._cache.clear()
            self._cache[number] = round_
        return round_

    def every(self, k: int) -> Topology:
        """Return the schedule with k - 1 local steps before each exchange.

        Round s of this topology is round ``k (s + 1) - 1`` of the result: rounds k - 1, 2 k - 1, ... exchange, all
        others are the identity. Warm-up, period and the rounds until all is exact are k times as long. For k = 1,
        and for a single rank, it is the topology itself.

        Parameters
        ----------
        k
            Exchange in every k-th round only; at least 1.

        Raises
        ------
        ValueError, TypeError
            If k is not an integer of at least 1.

        Examples
        --------
        >>> import topologies
        >>> local_sgd = topologies.build("complete", 4).every(3)
        >>> [local_sgd.round(t).is_identity for t in range(6)]
        [True, True, False, True, True, False]
        """
        from topologies.compositions import every

        return every(self, k)

    def then(self, other: Topology, *, after: int) -> Topology:
        """Return the schedule of this topology for some rounds, and of another one from then on.

        Round t is round t of this topology for ``t < after``, and round ``t - after`` of ``other`` from there on.
        The first ``after`` rounds are a warm-up: period and exactness are those of ``other``. For ``after=0``, and
        for a single rank, it is ``other`` itself.

        Parameters
        ----------
        other
            A topology of as many ranks.
        after
            How many rounds this topology runs; at least 0.

        Raises
        ------
        ValueError
            If ``after`` is negative, the world sizes differ, or one of the two is row- and the other one
            column-stochastic.
        TypeError
            If ``other`` is no topology or ``after`` no integer.

        Examples
        --------
        All-reduce for 100 rounds, then a ring:

        >>> import topologies
        >>> topologies.build("complete", 8).then(topologies.build("ring", 8), after=100)
        Topology('complete.then(ring, after=100)', world_size=8, warmup=100, period=1)
        """
        from topologies.compositions import then

        return then(self, other, after)

    def interleave(self, other: Topology) -> Topology:
        """Return the schedule in which this topology and another one take turns.

        Round 2 s is round s of this topology, round 2 s + 1 round s of ``other``. The period is twice the least
        common multiple of both. It takes a topology of as many ranks; neither of the two may have a warm-up.

        Raises
        ------
        ValueError
            If the world sizes differ, one has a warm-up, or one is row- and the other column-stochastic.
        TypeError
            If ``other`` is no topology.

        Examples
        --------
        >>> import topologies
        >>> rings = topologies.build("one_peer_ring", 8).interleave(topologies.build("one_peer_hypercube", 8))
        >>> rings.period, rings.round(3).neighbours(0)
        (12, {2: 0.5})
        """
        from topologies.compositions import interleave

        return interleave(self, other)

    def product(self, local: Topology) -> Topology:
        """Return the Kronecker product: this topology between machines, ``local`` between the ranks of each.

        Rank ``machine * local.world_size + place`` reads rank ``other * local.world_size + there`` with the weight
        ``W[machine, other] * local W[place, there]`` of round t of both. The period is the least common multiple;
        exact once both are. Neither of the two may have a warm-up.

        Raises
        ------
        ValueError
            If one has a warm-up, or one is row- and the other column-stochastic.
        TypeError
            If ``local`` is no topology.

        Examples
        --------
        Three machines in a ring; the two ranks of each work as one:

        >>> import topologies
        >>> topology = topologies.build("ring", 3).product(topologies.build("complete", 2))
        >>> topology.world_size, topology.round(0).self_weight(0)
        (6, 0.16666666666666666)
        """
        from topologies.placement import product

        return product(self, local)

    def permuted(self, order: Sequence[int]) -> Topology:
        """Return the same schedule with the ranks in other places.

        Parameters
        ----------
        order
            Rank ``order[place]`` does what rank ``place`` does in this topology: for a ring, the order in which it
            passes the ranks.

        Raises
        ------
        ValueError, TypeError
            If ``order`` does not name every rank once.

        Examples
        --------
        >>> import topologies
        >>> topologies.build("ring", 4).permuted([0, 2, 1, 3]).round(0).peers(0)
        (2, 3)
        """
        from topologies.compositions import permuted

        return permuted(self, order)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The topologies that run one after the other: only itself, unless made by :meth:`every` or :meth:`then`."""
        phases = self.make_round.phases if isinstance(self.make_round, Expression) else ()
        return phases or (Phase(self),)

    @property
    def warmup(self) -> int:
        """Number of rounds before the part that repeats begins; 0 unless the topology was made by :meth:`then`."""
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

    @property
    def exact_after(self) -> int | None:
        """After how many rounds from a period boundary all ranks hold exactly the mean; ``None``: never.

        Promised by the family, or else measured for a schedule with a period, see ``topologies.analysis``.
        """
        if self.promised_exact_after is not None or self.period is None:
            return self.promised_exact_after
        from topologies import analysis

        return analysis.exact_after(self)

    def describe(self) -> Description:
        """Return what can be measured of the topology: ``str()`` is one page of text, ``.to_dict()`` plain JSON."""
        from topologies.analysis.description import describe  # a description is about a topology: it cannot come first

        return describe(self)

    def to_json(self) -> str:
        """Return the topology as JSON: name, size and options of a registered one, the phases of a composed one.

        Any other is written as its rounds.

        Raises
        ------
        ValueError
            For a schedule from a function without a period: it has no end to write down.
        """
        from topologies.serialization import to_dict

        return json.dumps(to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Return the topology that :meth:`to_json` wrote.

        Raises
        ------
        ValueError
            If the text is not such JSON, or the family is not registered.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"text is not JSON ({error}); pass what Topology.to_json() returned") from None
        from topologies.serialization import from_dict

        return from_dict(data)

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same data; schedules from functions without a period equal only themselves."""
        if not isinstance(other, Topology):
            return NotImplemented
        if self is other:
            return True
        mine, theirs = self._identity(), other._identity()
        if mine != theirs:
            return False
        if self.registered and other.registered:
            return True
        if isinstance(self.make_round, Expression) or isinstance(other.make_round, Expression):
            return bool(self.make_round == other.make_round)
        return self.period is not None and all(self.round(t) == other.round(t) for t in range(self.period))

    def __hash__(self) -> int:
        return hash((self.name, self.world_size, self.period))

    def __repr__(self) -> str:
        options = f"{brief_options(self.options)}, " if self.options else ""
        warmup = f"warmup={self.warmup}, " if self.warmup else ""
        return f"Topology({self.name!r}, world_size={self.world_size}, {options}{warmup}period={self.period})"

    def __reduce__(self) -> tuple[Callable[..., Topology], tuple[Any, ...]]:
        """Pickle a registered topology by name and options, one of rounds by its rounds, a composed one by phases."""
        if self.registered:
            from topologies.registry import build

            return functools.partial(build, self.name, self.world_size, **self.options), ()
        names = (field.name for field in fields(self) if field.init and field.name != "registered")
        given = {name: getattr(self, name) for name in names} | {"options": dict(self.options)}
        return functools.partial(Topology, **given), ()

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
        if not round_.is_formula:
            check_sums(round_, self.stochasticity, where=where)
            if self.promised_symmetric and not self.registered and not round_.is_symmetric:
                raise ValueError(
                    f"{where} is not symmetric, which was promised; make W[i, j] == W[j, i], or do not pass "
                    f"symmetric=True"
                )


def check_topology(argument: str, value: object, world_size: int | str = "world_size") -> None:
    """Refuse what is no topology."""
    if not isinstance(value, Topology):
        raise TypeError(
            f"{argument} must be a Topology, got {value!r} ({type(value).__name__}); make one with "
            f"topologies.build(name, {world_size})"
        )
