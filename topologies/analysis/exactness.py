"""What holds exactly: the mean after some rounds, and the sums of rows and columns."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from topologies.analysis.connectivity import distinct_rounds, exchanges_from
from topologies.analysis.disagreement import ROUNDING
from topologies.round import Round
from topologies.schedule import Schedule
from topologies.validation import SUM_TOLERANCE, Stochasticity

#: Up to so many ranks exactness is a statement about the whole matrix, beyond about eight random vectors.
_MAX_DENSE_PRODUCT = 1024

#: What a single round must leave of a distance, at most, to end it. Rounds that only come closer leave more of it.
_ENDED = 1e-6


def exact_after(topology: Schedule, *, start: int | None = None) -> int | None:
    """Return the smallest k for which the product of k rounds is J, or ``None`` if there is none.

    Searched up to two periods and ceil(log2 n) exchanges more. A product that only comes ever closer to J is not
    exact: once it is within 1e-6 it counts only if the very next round brings it there. Above 1024 ranks the rounds
    are applied to eight random vectors: a product other than J takes these to their means with probability 0. Of
    column-stochastic rounds the ratios are judged that push-sum forms.

    ``start`` is the first round, by default that after the warm-up, which is a period boundary: from another one most
    schedules need longer. A topology without a period is refused.

    Examples
    --------
    >>> topology = topologies.build("alternating_exp_ring", 8, local_size=2)
    >>> exact_after(topology), exact_after(topology, start=1)
    (4, 5)
    """
    if topology.period is None:
        raise ValueError(f"topology {topology.name!r} has no period; exactness is a property of a repeated schedule")
    repeated, first, num_rounds_of = exchanges_from(topology, start)
    assert repeated.period is not None
    every = repeated.phases[-1].every
    most = max(0, repeated.warmup - first) + 2 * repeated.period + every * (topology.world_size - 1).bit_length()
    for exchange, (round_, distance) in enumerate(_distances(repeated, first, most)):
        if distance <= ROUNDING:
            return num_rounds_of(exchange + 1)
        if distance <= 1e-6 and not round_.is_identity:
            return None
    return None


def known_exact_after(topology: Schedule) -> int | None:
    """Return what the family promises of exactness, or else what is measured of a schedule with a period."""
    if topology.promised_exact_after is not None or topology.period is None:
        return topology.promised_exact_after
    return exact_after(topology)


def vanishes_within(topology: Schedule, num_rounds: int) -> bool:
    """Return whether the product of some of the first rounds is J, of a schedule with a period or without one.

    A product that comes closer and closer is J to rounding at some point, too. It does not count: one round must take
    it there from a distance a million times as large.
    """
    before = 1.0
    for _, distance in _distances(topology, 0, num_rounds):
        if distance <= min(ROUNDING, _ENDED * before):
            return True
        if distance <= 1e-2 * ROUNDING:
            return False  # what is below has too few digits to tell an end from rounding
        before = distance
    return False


def _distances(topology: Schedule, first: int, num_rounds: int) -> Iterator[tuple[Round, float]]:
    """Yield rounds from ``first`` on, each with how far it leaves the ranks from the mean, relative to the start."""
    n = topology.world_size
    mixed = np.eye(n) if n <= _MAX_DENSE_PRODUCT else np.random.default_rng(0).normal(size=(n, 8))
    mean, largest = mixed.mean(axis=0), max(1.0, float(np.abs(mixed).max()))
    scale = np.ones((n, 1))
    for t in range(first, first + num_rounds):
        round_ = topology.round(t)
        mixed = round_.mix(mixed)
        if topology.stochasticity == "column":
            scale = round_.mix(scale)
        yield round_, float(np.abs(mixed / scale - mean).max()) / largest


@dataclass(frozen=True)
class Sums:
    """Largest ``|sum - 1|`` over all rows, and over all columns, of some matrices, and their smallest entry."""

    rows: float
    columns: float
    smallest_weight: float

    @property
    def proven(self) -> Stochasticity | None:
        """The property that the sums prove: "doubly", "row" or "column" stochastic, or ``None`` for neither."""
        if self.rows <= SUM_TOLERANCE:
            return "doubly" if self.columns <= SUM_TOLERANCE else "row"
        return "column" if self.columns <= SUM_TOLERANCE else None


def sums(of: Schedule | Iterable[Round]) -> Sums:
    """Add up the rows and columns of every matrix: the proof that the mean is kept, and its largest deviation.

    Of a topology all exchanges of its warm-up and of one period are taken (16 of a part without a period).

    Examples
    --------
    >>> sums(topologies.build("star", 5)).proven
    'doubly'
    """
    rows = columns = 0.0
    smallest = float("inf")
    for round_ in distinct_rounds(of) if isinstance(of, Schedule) else of:
        rows = max(rows, float(np.abs(round_.row_sums() - 1.0).max()))
        columns = max(columns, float(np.abs(round_.column_sums() - 1.0).max()))
        smallest = min(smallest, round_.smallest_weight)
    return Sums(rows, columns, smallest)
