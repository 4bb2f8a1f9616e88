"""What can be measured of a topology, as one page of text and as plain data."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from topologies import analysis
from topologies.analysis.connectivity import MAX_DIAMETER_WORLD_SIZE, distinct_rounds
from topologies.analysis.exactness import known_exact_after
from topologies.schedule import Schedule, title
from topologies.validation import Stochasticity, check_measured_size

#: What ranks agree to when they are said to agree: 1 % of the worst disagreement is left.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Description:
    """The result of :meth:`Topology.describe`; ``str()`` is one page of text, :meth:`to_dict` plain JSON types.

    ``None`` marks values that are not defined: ``slem`` and ``spectral_gap`` unless the period is 1, ``exact_after`` if
    it never is or without a period, ``diameter`` and ``rounds_to_tolerance`` if it is never reached; and for the
    diameter of more than 2048 ranks, which is not measured.

    Attributes
    ----------
    warmup, period
        Rounds before the part that repeats, and before it does. The warm-up counts for ``max_sends``, ``max_receives``,
        ``largest_deviation``, ``symmetric`` and ``uniform_groups``; all else is about what comes after it.
    num_rounds
        Rounds measured after the warm-up: one period, or those of the first 16 exchanges of a schedule without one.
    max_sends, max_receives, mean_messages
        Most messages of one rank in one round, and their mean over ranks and rounds, point to point.
    bytes_per_rank
        Models sent per rank and round, on average, where uniform groups run as ring all-reduces.
    num_communicators, uniform_groups
        Distinct uniform groups of three and more ranks (pairs need none), and whether every round consists of such.
    connected, diameter
        Whether the edges of the rounds measured join all ranks (in both directions), and over how many of them.
    largest_deviation
        Largest ``|sum - 1|`` over the rows and columns that must sum to 1.
    slem, beta, rate
        As :mod:`topologies.analysis` has them, ``beta`` of the rounds measured.
    rounds_to_tolerance
        Rounds until at most 1 % is left of the worst disagreement.
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
    bytes_per_rank: float
    num_communicators: int
    uniform_groups: bool
    connected: bool
    diameter: int | None
    stochasticity: Stochasticity
    largest_deviation: float
    symmetric: bool
    slem: float | None
    spectral_gap: float | None
    beta: float
    rate: float
    rounds_to_tolerance: int | None
    exact_after: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def __str__(self) -> str:
        measured = "one period" if self.period else f"the first {count(self.num_rounds, 'round')}"
        period = count(self.period, "round") if self.period else "none"
        if self.warmup:
            measured += " after the warm-up; degree, groups, sums and symmetry over both"
            period += f", after a warm-up of {count(self.warmup, 'round')}"
        exact = count(self.exact_after, "round") if self.exact_after else "never"
        agreed = (
            "never" if self.rounds_to_tolerance is None else f"{self.rounds_to_tolerance} from the worst disagreement"
        )
        large = self.world_size > MAX_DIAMETER_WORLD_SIZE
        diameter = f"not measured above {MAX_DIAMETER_WORLD_SIZE} ranks" if large else "not connected"
        whose = "for these" if self.uniform_groups else "for those of the rounds that have uniform groups"
        communicators = f"{self.num_communicators} {whose}" if self.num_communicators else "none"
        if self.world_size == 1:
            agreed = exact = "at once: a single rank holds the mean"
        no_slem = "only defined for period 1"
        lines = [
            ("topology", title(self.name, self.options)),
            ("world size", str(self.world_size)),
            ("period", period),
            ("measured over", measured),
            (
                "degree",
                f"at most {count(self.max_sends, 'send')} and {count(self.max_receives, 'receive')} per rank and round",
            ),
            ("messages", f"{self.mean_messages:.4g} per rank and round on average, point to point"),
            ("bytes", f"{self.bytes_per_rank:.4g} x the model per rank and round on average"),
            ("uniform groups", "yes: every round can run as small all-reduces" if self.uniform_groups else "no"),
            ("communicators", communicators),
            ("connected", "yes" if self.connected else "no"),
            ("diameter", diameter if self.diameter is None else count(self.diameter, "edge")),
            ("stochastic", f"{self.stochasticity}, largest deviation {self.largest_deviation:.1e}"),
            ("symmetric", "yes" if self.symmetric else "no"),
            ("SLEM", _number(self.slem, no_slem)),
            ("spectral gap", _number(self.spectral_gap, no_slem)),
            ("beta", _number(self.beta) + " = ||product - J||"),
            ("consensus rate", f"{_number(self.rate)} per round in the long run"),
            ("rounds to 1 %", agreed),
            ("exact after", exact if self.period else "not promised: no period"),
        ]
        return "\n".join(f"{label:<14}  {text}" for label, text in lines)


def describe(topology: Schedule) -> Description:
    """Return what can be measured of a topology of at most a million ranks; ``str()`` of it is one page of text."""
    check_measured_size(topology.world_size)
    last = topology.phases[-1]
    repeated, all_rounds = distinct_rounds(topology, warmup=False), distinct_rounds(topology)
    sums, degrees, traffic = analysis.sums(all_rounds), analysis.degrees(topology), analysis.traffic(topology)
    deviations = {"doubly": max(sums.rows, sums.columns), "row": sums.rows, "column": sums.columns}
    slem = analysis.slem(last.topology) if topology.period == 1 else None
    large = topology.world_size > MAX_DIAMETER_WORLD_SIZE
    return Description(
        name=topology.name,
        options=dict(topology.options),
        world_size=topology.world_size,
        warmup=topology.warmup,
        period=topology.period,
        num_rounds=len(repeated) * last.every,
        max_sends=degrees.max_sends,
        max_receives=degrees.max_receives,
        mean_messages=degrees.mean,
        bytes_per_rank=traffic.bytes_per_rank,
        num_communicators=traffic.num_communicators,
        uniform_groups=all(round_.uniform_groups is not None for round_ in all_rounds),
        connected=analysis.connected(topology),
        diameter=None if large else analysis.diameter(topology),
        stochasticity=topology.stochasticity,
        largest_deviation=deviations[topology.stochasticity],
        symmetric=all(round_.is_symmetric for round_ in all_rounds),
        slem=slem,
        spectral_gap=None if slem is None else 1.0 - slem,
        beta=analysis.beta(last.topology, len(repeated)),
        rate=analysis.consensus_rate(topology),
        rounds_to_tolerance=analysis.rounds_to(topology, TOLERANCE),
        exact_after=known_exact_after(topology),
    )


def count(number: int, noun: str) -> str:
    """Return "1 round", "2 rounds"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _number(value: float | None, otherwise: str = "") -> str:
    """Return six digits; what is left of 0 after rounding prints as 0."""
    if value is None:
        return otherwise
    return f"{value if abs(value) > 1e-12 else 0.0:.6g}"
