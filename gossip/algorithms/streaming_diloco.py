"""Streaming DiLoCo: the buckets take turns, and their messages have several steps to arrive."""

import copy
from collections.abc import Mapping
from typing import Self

import torch

from gossip.algorithms.base import VALUES, Algorithm, Kept
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.diloco import DiLoCo
from gossip.algorithms.outer_steps import ANCHOR, OuterFactory
from topologies import Round, Topology
from topologies.validation import check_integer, check_real

SENT, OTHERS = "sent", "others"


class StreamingDiLoCo(DiLoCo):
    r"""DiLoCo whose buckets are exchanged in turn, and whose averages arrive some steps after they were started.

    Bucket b belongs to part b modulo P, and part p is averaged after each step t for which H divides :math:`t + 1 -
    \lfloor p H / P \rfloor`: a P-th of the bytes at a time. The average is combined s steps later, while the ranks
    continue with :math:`x_i` as it is. With :math:`x_i'` the values that were sent:

    .. math::
        \Delta = a - \frac1n \sum_i x_i', \qquad v \leftarrow \mu\, v + \Delta, \qquad
        a \leftarrow a - \alpha\, (\Delta + \mu\, v), \qquad x_i \leftarrow \beta\, x_i + (1 - \beta)\, a

    With P = 1, s = 1 and :math:`\beta = 0` this is DiLoCo in its form "awc". Compressions make the messages smaller.

    With ``eager``, a part moves as soon as it is sent: by what its own rank has moved since the last time, which counts
    one n-th, and by what the others had moved before that, whose average has arrived meanwhile. Anchor and velocity
    are then each rank's own:

    .. math::
        \Delta_i(s) = a_i - x_i, \qquad
        \Delta = \frac1n \Delta_i(s) + \frac1n \sum_{j \ne i} \Delta_j(s-1)

    Sends one message every H steps and keeps three tensors per bucket, four with ``eager``. Every round must be the
    exact average, so the topology must be complete. Choose ``bucket_cap_mb`` such that there are at least P buckets.
    Use it where even the averages of DiLoCo hold up training.

    Parameters
    ----------
    period : int
        H, the number of steps from one exchange of a bucket to its next, at least 1.
    parts : int
        P, at least 1 and at most H.
    overlap : int
        s, the number of steps that messages have to arrive, at least 1 and at most H.
    local_share : float
        :math:`\beta`, at least 0 and below 1: the share of its own values that a rank keeps.
    outer_lr : float
        The outer rate, above 0.
    outer_momentum : float
        The outer momentum, at least 0 and below 1.
    outer : callable, optional
        The outer optimizer in place of this one, as for :class:`DiLoCo`.
    eager : bool
        Whether a part moves when it is sent, by older movements of the others, instead of when the average arrives.
        Choose it where messages need most of a period. A global average drops the movements that are still to come.

    References
    ----------
    Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a distributed free lunch", 2025,
    algorithm 2. Kale, Douillard and Donchev, "Eager updates for overlapped communication and computation in DiLoCo",
    2025, arXiv 2502.12996, algorithm 2.
    """

    keeps: Mapping[str, Kept] = {SENT: Kept("mean", "own")}
    _constants = ("period", "parts", "overlap", "local_share", "outer_lr", "outer_momentum", "eager")
    _share = 1.0  # of one rank in a mean over all

    def __init__(
        self,
        period: int = 50,
        parts: int = 4,
        overlap: int = 5,
        local_share: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        outer: OuterFactory | None = None,
        eager: bool = False,
    ) -> None:
        self.eager = eager
        if eager:
            self.keeps, self._scope = {**self.keeps, OTHERS: Kept("mean", "own")}, "own"
        super().__init__(period, outer_lr, outer_momentum, form="awc", outer=outer)
        self.parts = check_integer("parts", parts, minimum=1, maximum=period)
        self.overlap = check_integer("overlap", overlap, minimum=1, maximum=period)
        self.local_share = check_real("local_share", local_share, "at least 0 and below 1", example=0.9)

    def on(self, topology: Topology, delivers: float = 1.0) -> Self:
        del delivers
        bound = copy.copy(self)
        bound._share = 1 / topology.world_size
        return bound

    def averaged(self, bucket: BucketView) -> None:
        super().averaged(bucket)
        if self.eager:
            bucket.kept[OTHERS].zero_()

    def is_exchanged(self, bucket: int, step: int) -> bool:
        first = bucket % self.parts * self.period // self.parts
        return (step + 1 - first) % self.period == 0 and step + 1 > first

    def steps_alone(self, step: int, round_: Round) -> bool:
        del step, round_
        return True  # in the steps in which a bucket is exchanged

    def begin(self, bucket: BucketView) -> None:
        super().begin(bucket)
        if not self.eager:
            bucket.kept[SENT].copy_(bucket.values)

    def updated(self, bucket: BucketView) -> None:
        if not bucket.exchanges:
            return
        if not self.eager:
            bucket.kept[SENT].copy_(bucket.values)
            return
        moved = torch.sub(bucket.kept[ANCHOR], bucket.values, out=bucket.kept[SENT])
        self._move(bucket, bucket.kept[OTHERS].add(moved, alpha=self._share))

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        return {VALUES: bucket.kept[SENT].to(bucket.values.dtype) if self.eager else bucket.values}

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        sent, difference = bucket.kept[SENT], got[VALUES].difference
        if self.eager:
            torch.add(difference, sent, alpha=1 - self._share, out=bucket.kept[OTHERS])
        else:
            self._move(bucket, bucket.kept[ANCHOR] - (sent + difference))

    def _move(self, bucket: BucketView, delta: torch.Tensor) -> None:
        anchor = bucket.kept[ANCHOR]
        self._outer.step_(bucket, delta)
        bucket.values.copy_(anchor + self.local_share * (bucket.values - anchor))

    schedule = Algorithm.schedule  # a bucket's turn says when it is exchanged
    describe = Algorithm.describe  # it has one form
