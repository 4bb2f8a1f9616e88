"""What can be measured of a topology, as text and as plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

from topologies import analysis
from topologies.phases import brief_options
from topologies.topology import MAX_DENSE_WORLD_SIZE
from topologies.validation import Stochasticity

if TYPE_CHECKING:
    from topologies.round import Round
    from topologies.topology import Topology

#: How many rounds are measured of a schedule without a period.
SAMPLED_ROUNDS = 16


@dataclass(frozen=True)
class Description:
    """What :meth:`Topology.describe` found; ``str()`` is one page of text, :meth:`to_dict` plain JSON types.

    A value that was not measured is ``None``: ``slem`` and ``spectral_gap`` unless the period is 1, ``exact_after``
    without a period or if it never is, and these and ``beta`` above 1024 ranks.

    Attributes
    ----------
    warmup
        Rounds before the part that repeats. They count for ``max_sends``, ``max_receives``, ``largest_deviation``,
        ``symmetric`` and ``uniform_groups``; all else is about what comes after them.
    period
        Rounds before that part repeats.
    num_rounds
        Rounds measured after the warm-up: one period, or those of the first 16 exchanges of a schedule without one.
    max_sends, max_receives
        Most messages of one rank in one round.
    mean_messages
        Messages sent per rank and round, on average, point to point.
    largest_deviation
        Largest ``|sum - 1|`` over the rows and columns that must sum to 1.
    slem
        Second largest modulus of the eigenvalues of W.
    beta
        ``||product of the rounds measured - J||_2``.
    connected
        Whether the edges of the rounds measured join all ranks (in both directions).
    uniform_groups
        Whether every round can run as one small all-reduce per group.
    """

    name: str
    options: dict[str, Any]
    world_size: int
    warmup: int
    period: int | None
    num_rounds: int
    max_sends: int
    max_receives: int
    mean_messages: float
    uniform_groups: bool
    connected: bool
    stochasticity: Stochasticity
    largest_deviation: float
    symmetric: bool
    slem: float | None
    spectral_gap: float | None
    beta: float | None
    exact_after: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def __str__(self) -> str:
        lines = self._lines()
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)

    def _lines(self) -> list[tuple[str, str]]:
        measured = "one period" if self.period else f"the first {self.num_rounds} rounds"
        period = _count(self.period, "round") if self.period else "none"
        if self.warmup:
            measured += " after the warm-up; degree, groups, sums and symmetry over both"
            period += f", after a warm-up of {_count(self.warmup, 'round')}"
        large = self.world_size > MAX_DENSE_WORLD_SIZE
        unmeasured = f"not measured above {MAX_DENSE_WORLD_SIZE} ranks"
        no_slem = unmeasured if large else "only defined for period 1"
        if self.exact_after:
            exact = _count(self.exact_after, "round")
        elif not self.period:
            exact = "not promised: no period"
        else:
            exact = unmeasured if large else "never"
        return [
            ("topology", self.name + (f" ({brief_options(self.options)})" if self.options else "")),
            ("world size", str(self.world_size)),
            ("period", period),
            ("measured over", measured),
            (
                "degree",
                f"at most {_count(self.max_sends, 'send')} and {_count(self.max_receives, 'receive')} per rank and "
                f"round",
            ),
            ("messages", f"{self.mean_messages:.4g} per rank and round on average, point to point"),
            ("uniform groups", "yes: every round can run as small all-reduces" if self.uniform_groups else "no"),
            ("connected", "yes" if self.connected else "no"),
            ("stochastic", f"{self.stochasticity}, largest deviation {self.largest_deviation:.1e}"),
            ("symmetric", "yes" if self.symmetric else "no"),
            ("SLEM", _number(self.slem, no_slem)),
            ("spectral gap", _number(self.spectral_gap, no_slem)),
            ("beta", _number(self.beta, unmeasured) + " = ||product - J||"),
            ("exact after", exact),
        ]


def describe(topology: Topology) -> Description:
    """Measure a topology over its warm-up, if it has one, and one period, or 16 exchanges if it has none."""
    parts = [
        [phase.topology.round(exchange) for exchange in range(phase.num_distinct(sampled=SAMPLED_ROUNDS))]
        for phase in topology.phases
    ]
    last = topology.phases[-1]
    rounds, repeated = [round_ for part in parts for round_ in part], parts[-1]
    dense = topology.world_size <= MAX_DENSE_WORLD_SIZE
    slem = analysis.slem(repeated[0].matrix()) if dense and topology.period == 1 else None
    return Description(
        name=topology.name,
        options=dict(topology.options),
        world_size=topology.world_size,
        warmup=topology.warmup,
        period=topology.period,
        num_rounds=len(repeated) * last.every,
        max_sends=max(int(round_.num_targets().max()) for round_ in rounds),
        max_receives=max(int(round_.num_sources().max()) for round_ in rounds),
        mean_messages=float(np.mean([round_.num_targets().mean() for round_ in repeated])) / last.every,
        uniform_groups=all(round_.uniform_groups is not None for round_ in rounds),
        connected=_connected(topology.world_size, repeated),
        stochasticity=topology.stochasticity,
        largest_deviation=_largest_deviation(rounds, topology.stochasticity),
        symmetric=all(round_.is_symmetric for round_ in rounds),
        slem=slem,
        spectral_gap=None if slem is None else 1.0 - slem,
        beta=analysis.beta(analysis.product(last.topology, len(repeated))) if dense else None,
        exact_after=topology.exact_after,
    )


def _largest_deviation(rounds: Sequence[Round], stochasticity: Stochasticity) -> float:
    sums = []
    for round_ in rounds:
        if stochasticity in ("doubly", "row"):
            sums.append(round_.row_sums())
        if stochasticity in ("doubly", "column"):
            sums.append(round_.column_sums())
    return float(max(np.abs(each - 1.0).max() for each in sums))


def _connected(world_size: int, rounds: Sequence[Round]) -> bool:
    union = nx.DiGraph()
    union.add_nodes_from(range(world_size))
    for round_ in rounds:
        if round_.uniform_groups is None:
            union.add_edges_from((j, i) for i in range(world_size) for j in round_.neighbours(i))
        else:  # a cycle joins a group with fewer edges than all its pairs
            for group in round_.uniform_groups:
                union.add_edges_from(zip(group, (*group[1:], group[0]), strict=True))
    return bool(nx.is_strongly_connected(union))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _number(value: float | None, otherwise: str) -> str:
    """Return six digits; what is left of 0 after rounding prints as 0."""
    if value is None:
        return otherwise
    return f"{value if abs(value) > 1e-12 else 0.0:.6g}"
