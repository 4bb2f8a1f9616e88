"""How fast a topology averages: spectra of one round, products of rounds, rates, and rounds to a tolerance.

J stands for 11^T / n, the exact average. A product of rounds need not be symmetric: one use of it is judged by its
largest singular value, its repetition by the modulus of its eigenvalues, never one by the other. Column-stochastic
rounds are judged by the ratios that push-sum forms. Up to 384 ranks all is computed from dense matrices, beyond by
sparse methods; a slow schedule's ``rounds_to`` is then extrapolated.
"""

import bisect
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from topologies.analysis.connectivity import distinct_rounds, exchanges_from
from topologies.analysis.disagreement import MAX_DENSE_SPECTRUM, ROUNDING, Disagreement
from topologies.analysis.exactness import known_exact_after, sums, vanishes_within
from topologies.matrix_storage import FloatArray
from topologies.round import Round
from topologies.schedule import Schedule, check_schedule
from topologies.validation import check_integer, check_real

#: Rounds from which the rate of a schedule without a period is taken.
SAMPLED_ROUNDS = 64

#: Rounds after which a schedule without a period is given up.
_MAX_RANDOM_ROUNDS = 1 << 14

#: A schedule with a period that has not agreed by then has a bias and never will.
_NEVER = 1 << 50

#: Above the sizes of dense spectra a schedule is followed round by round up to so many, and extrapolated from there.
_MAX_FOLLOWED_ROUNDS = 256


def product(topology: Schedule, num_rounds: int, *, start: int = 0) -> FloatArray:
    """Return ``W_(s+k-1) ... W_(s+1) W_s`` for k = ``num_rounds`` and s = ``start``, a dense ``[n, n]`` array."""
    mixed = np.eye(topology.world_size)
    num_rounds = check_integer("num_rounds", num_rounds, minimum=0)
    for t in range(start, start + num_rounds):
        mixed = topology.round(t).mix(mixed)
    return mixed


def slem(of: Schedule | Round | npt.ArrayLike) -> float:
    """Return the second largest modulus of the eigenvalues of W: the rate when W is used in every round.

    The eigenvalue 1 of the vector 1 belongs to the mean and does not count; it is 0 for a single rank. For matrices
    that are not symmetric it may say little: all other eigenvalues of a De Bruijn graph are 0 (and come out as 1e-4
    or less, rounding of a defective matrix), and yet one round leaves the worst disagreement as it is.

    It takes a topology with period 1, a round, or a stochastic matrix of shape ``[n, n]``.

    Raises
    ------
    ValueError
        For a topology with another period (the eigenvalues of a product say nothing about one use of it), or a matrix
        that is not stochastic.

    Examples
    --------
    >>> round(slem(topologies.build("ring", 6)), 12)
    0.666666666667
    """
    if isinstance(of, Schedule) and of.period != 1:
        raise ValueError(
            f"slem is defined for one matrix that is used in every round, topology {of.name!r} has period {of.period}; "
            f"use consensus_rate or beta"
        )
    round_ = of.round(of.warmup) if isinstance(of, Schedule) else _as_round(of)
    if sums([round_]).proven is None:
        raise ValueError(
            "slem is defined for a matrix whose rows or columns sum to 1, neither do; pass a stochastic matrix"
        )
    if isinstance(of, Schedule) and known_exact_after(of) is not None:
        return 0.0  # W^k = J for some k: of such a matrix the computed eigenvalues are all rounding
    return Disagreement([round_]).spectral_radius()


def spectral_gap(of: Schedule | Round | npt.ArrayLike) -> float:
    """Return ``1 - slem(of)``."""
    return 1.0 - slem(of)


def beta(of: Schedule | Round | npt.ArrayLike, num_rounds: int | None = None, *, start: int | None = None) -> float:
    """Return ``||M - J||_2``, the largest factor by which M leaves a distance to the mean.

    M is a round or a matrix of shape ``[n, n]``, or the product of ``num_rounds`` rounds of a topology from ``start``
    on: by default of one period after the warm-up, or of the first 64 rounds of a schedule without one.

    Examples
    --------
    >>> one_peer = topologies.build("one_peer_exponential", 8)
    >>> round(beta(one_peer, 1), 4), beta(one_peer)
    (0.9239, 0.0)
    """
    if not isinstance(of, Schedule):
        return _small_is_zero(Disagreement([_as_round(of)]).norm())
    if num_rounds is None:
        of, start, _ = exchanges_from(of, start)
        num_rounds = of.period or SAMPLED_ROUNDS
    start = of.warmup if start is None else check_integer("start", start, minimum=0)
    return _small_is_zero(disagreement(of, check_integer("num_rounds", num_rounds, minimum=1), start).norm())


def consensus_errors(topology: Schedule, num_rounds: int, *, start: int = 0) -> FloatArray:
    """Return what k rounds leave of the worst disagreement, for k = 0 .. num_rounds: ``||R_k - J||_2``, R_0 = I.

    R_k is the product of k rounds from ``start`` on, or what push-sum makes of it if they are only column-stochastic.
    What is only row-stochastic ends at its bias, not at 0. The array has ``num_rounds + 1`` numbers, 0.0 where the
    ranks hold the mean up to rounding.

    Examples
    --------
    >>> consensus_errors(topologies.build("hyper_cuboid", 6, factors=(2, 3)), 3).round(3)
    array([1., 1., 0., 0.])
    """
    num_rounds = check_integer("num_rounds", num_rounds, minimum=0)
    error_after = _errors(topology, check_integer("start", start, minimum=0))
    return np.array([_small_is_zero(error_after(k)) for k in range(num_rounds + 1)])


def consensus_rate(topology: Schedule) -> float:
    """Return the factor per round by which a disagreement shrinks in the long run; 0.0 if it vanishes exactly.

    It is the spectral radius of the period's product (without the mean) to the power of 1 / period. Without a
    period it is a sample, the mean factor over the first rounds (64, or fewer if hardly anything is left by then);
    0.0 if the product of some of them is J. 1.0: the ranks never agree.

    Examples
    --------
    >>> round(consensus_rate(topologies.build("ring", 6)), 12)
    0.666666666667
    """
    check_schedule("topology", topology)
    repeated = topology.phases[-1]
    if topology.world_size == 1 or known_exact_after(topology) is not None:
        return 0.0
    period = repeated.topology.period
    if period is None:
        num_rounds = SAMPLED_ROUNDS
        if vanishes_within(repeated.topology, num_rounds):
            return 0.0  # the rounds before that say nothing: none of them may have changed the worst disagreement
        while (factor := disagreement(repeated.topology, num_rounds, 0).norm()) < 1e-9 and num_rounds > 1:
            num_rounds //= 2  # down to what is more than rounding
    else:
        num_rounds = period
        # Push-sum's ratios shrink as the eigenvalues of the product itself, without that of the total.
        rounds = [repeated.topology.round(t) for t in range(num_rounds)]
        factor = Disagreement(rounds).spectral_radius()
    return float(min(factor, 1.0) ** (1.0 / (num_rounds * repeated.every)))


def rounds_to(topology: Schedule, tolerance: float, *, start: int | None = None) -> int | None:
    """Return after how many rounds the worst disagreement is down to ``tolerance`` of its size; ``None``: never.

    The smallest k with ``||R_k - J||_2 <= tolerance``. Above 384 ranks a schedule that needs more than 256 rounds is
    extrapolated by :func:`consensus_rate`, which is exact for one symmetric matrix and else right for large k.
    A schedule without a period is given up after 16,384 rounds; above 384 ranks, if its first 64 rounds leave some
    disagreement as it was.

    Where a round may enlarge a disagreement (some negative weights, row- or column-stochastic matrices), the first 256
    rounds are looked at one by one, and a later k is found by bisection: below the tolerance, not always the first.

    The tolerance lies between 0 and 1, both excluded; ``start`` is the first round, by default that after the warm-up.

    Examples
    --------
    >>> rounds_to(topologies.build("ring", 16), 0.01), rounds_to(topologies.build("hypercube", 16), 0.01)
    (89, 10)
    """
    tolerance = check_real("tolerance", tolerance, "between 0 and 1, both excluded", example=0.01)
    if topology.world_size == 1:
        return 0
    exchanges, first, num_rounds_of = exchanges_from(topology, start)
    large = exchanges.world_size > MAX_DENSE_SPECTRUM
    is_random = exchanges.period is None
    rate = None if is_random and not large else consensus_rate(exchanges)
    if rate is not None and rate >= 1.0 - ROUNDING / topology.world_size:
        return None
    if exchanges.stochasticity == "row" and not is_random and bias(exchanges) > tolerance:
        return None
    error_after = _errors(exchanges, first)
    if rate and large:
        followed = max(0, exchanges.warmup - first)
        left = max(error_after(followed), ROUNDING)  # of the warm-up, if it starts there
        expected = followed + math.log(tolerance / left) / math.log(rate)
        if left > tolerance and expected > _MAX_FOLLOWED_ROUNDS:
            return num_rounds_of(math.ceil(expected - 1e-9))
    enough = tolerance * (1 + ROUNDING)
    if is_random and not large:
        # Round by round: a random round may lead away from J.
        needed = next((k for k in range(1, _MAX_RANDOM_ROUNDS + 1) if error_after(k) <= enough), None)
    else:
        needed = _first(lambda k: error_after(k) <= enough)
        if needed is not None and not large and not _never_grows(exchanges):
            # Bisection found one such k; rounds that enlarge a disagreement may hide an earlier one.
            earlier = range(1, min(needed, _MAX_FOLLOWED_ROUNDS + 1))
            needed = next((k for k in earlier if error_after(k) <= enough), needed)
    return None if needed is None else num_rounds_of(needed)


def _never_grows(topology: Schedule) -> bool:
    """Whether no round enlarges a disagreement, as none does that is doubly stochastic without negative weights."""
    rounds = distinct_rounds(topology)
    found = sums(rounds)
    if found.proven != "doubly":
        return False
    return found.smallest_weight >= 0.0 or all(Disagreement([round_]).norm() <= 1.0 + ROUNDING for round_ in rounds)


def bias(topology: Schedule) -> float:
    """Return ``||lim R_k - J||_2``: how far from the mean the ranks agree, for a schedule with a period.

    0.0 unless it is only row-stochastic. Then the ranks agree on ``sum_j pi_j x_j``, with the stationary weights pi of
    a period's product, ``pi W_(p-1) .. W_0 = pi``.

    Examples
    --------
    >>> import networkx, topologies
    >>> round(bias(topologies.Topology.from_graph(networkx.star_graph(3), "uniform")), 4)
    0.3464
    """
    repeated = topology.phases[-1].topology
    if repeated.stochasticity != "row":
        return 0.0
    if repeated.period is None:
        raise ValueError(f"topology {topology.name!r} has no period, so it has no limit; use consensus_errors")
    weights = disagreement(repeated, repeated.period, 0).stationary_weights()
    return float(np.linalg.norm(weights - 1.0 / len(weights)) * math.sqrt(len(weights)))


def disagreement(topology: Schedule, num_rounds: int, start: int) -> Disagreement:
    """Return what rounds ``start`` .. ``start + num_rounds - 1`` do to a disagreement."""
    rounds = [topology.round(t) for t in range(start, start + num_rounds)]
    return Disagreement(rounds or [Round.identity(topology.world_size)], column=topology.stochasticity == "column")


def _errors(topology: Schedule, start: int) -> Callable[[int], float]:
    """Return the function from k to ``||R_k - J||_2`` for the rounds from ``start`` on."""
    if topology.world_size > MAX_DENSE_SPECTRUM:
        if topology.period == 1 and start >= topology.warmup and topology.symmetric:
            one_round = disagreement(topology, 1, start).norm()
            return lambda k: one_round**k
        return lambda k: disagreement(topology, k, start).norm()
    column = topology.stochasticity == "column"
    products = _Products(topology, start)

    def error_after(k: int) -> float:
        mixed = products(k)
        if column:
            mixed = mixed / mixed.sum(axis=1, keepdims=True)
        return float(np.linalg.norm(mixed - 1.0 / len(mixed), ord=2))

    return error_after


class _Products:
    """Dense products of the first k rounds from ``start`` on, for any k, quickly for rising k and for whole periods."""

    def __init__(self, topology: Schedule, start: int) -> None:
        self.topology = topology
        self.start = start
        self.period = topology.period if start >= topology.warmup else None
        self._last = 0, np.eye(topology.world_size)
        self._whole: FloatArray | None = None

    def __call__(self, k: int) -> FloatArray:
        done, mixed = self._last
        if self.period is not None and k >= self.period and not done <= k < done + self.period:
            if self._whole is None:
                self._whole = product(self.topology, self.period, start=self.start)
            done, mixed = k - k % self.period, np.linalg.matrix_power(self._whole, k // self.period)
        elif done > k:
            done, mixed = 0, np.eye(self.topology.world_size)
        for t in range(self.start + done, self.start + k):
            mixed = self.topology.round(t).mix(mixed)
        self._last = k, mixed
        return mixed


def _first(holds: Callable[[int], bool]) -> int | None:
    """Return the smallest k from 1 on for which a property holds that holds for all larger k too."""
    above = 1
    while not holds(above):
        above *= 2
        if above > _NEVER:
            return None
    between = range(above // 2 + 1, above)
    return above // 2 + 1 + bisect.bisect_left(between, True, key=holds)


def _as_round(of: Round | npt.ArrayLike) -> Round:
    return of if isinstance(of, Round) else Round.from_matrix(of)


def _small_is_zero(value: float) -> float:
    return value if value > ROUNDING else 0.0
