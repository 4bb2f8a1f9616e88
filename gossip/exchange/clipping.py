"""Clips what arrives along an edge to a multiple of what is usual there, alike at both ends."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gossip.algorithms import Algorithm
from gossip.compression.codec import Compression
from gossip.exchange.outlier_detection import NUM_ASTRAY, OWN_SHARE, SHARE_OF_NORM, Edge, Place, Usual
from gossip.measuring.step_stats import Meter
from topologies import Round

CLIPS_ABOVE = 2.0
"""The multiple of what is usual to which ``max_difference="clip"`` clips."""

_Known = tuple[int, bool]
"""A source, and whether it knows the distance too because it receives from this rank in the same round."""


@dataclass
class _Streak:
    """Exchanges of a bucket without a break in which all of this rank's edges were clipped."""

    length: int = 0
    has_moved: bool = False  # this rank's own message, when it began
    sources: set[int] = field(default_factory=set)


class Clipping:
    r"""Clips the differences of one rank to its peers, along every edge by itself (ClippedGossip).

    .. math::
        x_i \leftarrow x_i + \sum_j W_{ij}\, \min\Bigl(1, \frac{\tau_{ij}}{\|m_j - m_i\|}\Bigr) (m_j - m_i)

    with :math:`\tau_{ij}` the ``multiple`` of what is usual along the edge (:class:`Usual`), which both ends compute
    from the distances that they have in common: in an undirected round what one end adds the other subtracts, and the
    mean over ranks is exact. Along a directed edge the receiver clips alone, and the mean is moved. Along an edge of
    which too little is known, the smaller norm of the two messages stands for :math:`\tau_{ij}`, except in the first
    steps, when values may be close to zero.

    References
    ----------
    He, Karimireddy and Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022, with a threshold that
    is estimated from the edge's own past.
    """

    def __init__(self, rank: int, multiple: float) -> None:
        self._rank, self._multiple = rank, multiple
        self._usual: dict[Place, dict[_Known, Usual]] = {}
        self._surplus: dict[Place, dict[_Known, float]] = {}  # of the exchange under way
        self._step: dict[Place, int] = {}  # the one that it began in
        self._newest: dict[Place, dict[int, tuple[float, float]]] = {}  # distances and factors of the newest exchange
        self._streaks: dict[int, _Streak] = {}

    def expect(self, place: Place, edges: Round, step: int) -> None:
        """Note the edges and the step of an exchange that begins."""
        rank, self._step[place] = self._rank, step
        backwards = {source: edges.neighbours(source) for source in edges.neighbours(rank)}
        self._surplus[place] = {
            (source, rank in backwards[source]): max(0.0, weight - backwards[source].get(rank, 0.0))
            for source, weight in edges.neighbours(rank).items()
        }

    def factors(
        self, place: Place, distances: Mapping[int, float], smaller_norm: Callable[[int], float] | None = None
    ) -> dict[int, float]:
        """Return by which factor each difference is to be scaled, by source, and learn from the distances.

        ``distances`` to the sources' messages are equal at both ends of an edge, to the bit; so is the smaller norm of
        a source's message and this rank's own, which ``smaller_norm`` returns.
        """
        edges = self._usual.setdefault(place, {})
        newest = self._newest[place] = {}
        for known in self._surplus[place]:
            if (source := known[0]) not in distances:
                continue  # it is lost
            distance, usual = distances[source], edges.setdefault(known, Usual())
            limit = self._multiple * usual.distance if usual.is_known else math.inf
            if not usual.is_known and smaller_norm is not None and self._step.get(place, 0) >= NUM_ASTRAY:
                limit = smaller_norm(source) or math.inf
            factor = 1.0 if distance <= limit else limit / distance
            usual.learn(distance, is_unusual=factor < 1 or not math.isfinite(distance))
            newest[source] = distance, factor
        return {source: factor for source, (_, factor) in newest.items()}

    def squares(self, place: Place) -> dict[Edge, float]:
        """Return the squared distances of the newest exchange, before anything was clipped."""
        return {(source,): distance**2 for source, (distance, _) in self._newest.get(place, {}).items()}

    def settle(self, place: Place, world_size: int, moved: float, norm: Callable[[], float], meter: Meter) -> bool:
        """Count what was clipped in the newest exchange, and return whether this rank has gone astray.

        That is so if all edges that it had in :const:`NUM_ASTRAY` exchanges were clipped, and either several other
        ranks were at their ends, or it was this rank that moved when that began. ``moved`` is how far this rank's own
        message is from the one before, and ``norm`` returns that of its values.
        """
        newest = self._newest.pop(place, {})
        clipped = {source: distance for source, (distance, factor) in newest.items() if factor < 1}
        meter.num_clipped += len(clipped)
        for (source, _), surplus in self._surplus.get(place, {}).items():
            if surplus and source in clipped:  # the other end subtracts less than this one adds, or nothing
                meter.mean_moved += surplus * (1 - newest[source][1]) * clipped[source] / world_size
        streak = self._streaks.setdefault(place[0], _Streak())
        if clipped and len(clipped) == len(newest) and min(clipped.values()) > SHARE_OF_NORM * (norm() - moved):
            if not streak.length:
                streak.has_moved = moved > OWN_SHARE * max(clipped.values())
            streak.length += 1
            streak.sources |= clipped.keys()
        elif newest:
            self._streaks[place[0]] = _Streak()
        return streak.length >= NUM_ASTRAY and (streak.has_moved or len(streak.sources) > 1)

    def state_dict(self) -> dict[str, Any]:
        """Return what is usual and what has been clipped without a break, as plain data."""
        return {
            "usual": [
                [*place, *known, usual.distance, usual.num_known, usual.num_unusual]
                for place, edges in self._usual.items()
                for known, usual in edges.items()
            ],
            "streaks": [
                [bucket, streak.length, streak.has_moved, sorted(streak.sources)]
                for bucket, streak in self._streaks.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._usual, self._newest = {}, {}
        for bucket, channel, source, is_mutual, *numbers in state["usual"]:
            self._usual.setdefault((bucket, channel), {})[source, is_mutual] = Usual(*numbers)
        self._streaks = {
            bucket: _Streak(length, has_moved, set(sources)) for bucket, length, has_moved, sources in state["streaks"]
        }


def clips_above(max_difference: str | float | None) -> float | None:
    """Return the multiple of what is usual along an edge to which differences are clipped; None if they are not."""
    if max_difference == "clip":
        return CLIPS_ABOVE
    return max_difference if isinstance(max_difference, int | float) else None


def check_max_difference(value: object) -> None:
    """Refuse a value that is neither a choice nor a multiple of what is usual."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value not in ("warn", "clip", None) and not (is_number and 1 <= value < math.inf):  # type: ignore[operator]
        raise ValueError(
            'max_difference must be "warn", "clip", None, or a multiple of what is usual that is finite and at least '
            f"1, got {value!r}"
        )


def check_clipping(
    max_difference: str | float | None,
    algorithm: Algorithm,
    compression: Compression,
    *,
    has_soft_deadline: bool = False,
) -> None:
    """Refuse what does not work if differences are clipped, where they are."""
    if clips_above(max_difference) is None:
        return
    what = f"max_difference={max_difference!r}"
    if algorithm.unclipped_because:
        raise ValueError(
            f"{what} cannot be combined with algorithm {algorithm.describe()}, which {algorithm.unclipped_because}; "
            'choose max_difference="warn" or another algorithm'
        )
    if not compression.can_clip:
        raise ValueError(
            f"{what} cannot be combined with compression {compression.describe()}, with which the two ends of an edge "
            "do not know both messages; choose none, bf16, fp16, int8 or int4"
        )
    if has_soft_deadline:
        raise ValueError(
            f"{what} cannot be combined with soft_deadline, whose late messages are mixed in unclipped; leave one out"
        )
