"""Streaming DiLoCo: the buckets take turns, and their messages have several steps to travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gossip.algorithms.base import VALUES, Resized
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.diloco import DiLoCo
from gossip.algorithms.outer_arguments import check_fraction, check_period
from gossip.algorithms.outer_steps import ANCHOR
from topologies import Topology

SENT = "sent"


class StreamingDiLoCo(DiLoCo):
    r"""DiLoCo whose buckets are exchanged in turn, and whose averages arrive some steps after they were asked for.

    Bucket b belongs to part b modulo P, and part p is averaged after each step t for which H divides
    :math:`t + 1 - \lfloor p H / P \rfloor`: a P-th of the bytes at a time. The average is combined s steps later, while
    the ranks go on with :math:`x_i` as it is. With :math:`x_i'` what was sent:

    .. math::
        \Delta = a - \frac1n \sum_i x_i', \qquad v \leftarrow \mu\, v + \Delta, \qquad
        a \leftarrow a - \alpha\, (\Delta + \mu\, v), \qquad x_i \leftarrow \beta\, x_i + (1 - \beta)\, a

    With P = 1, s = 1 and :math:`\beta = 0` it is DiLoCo in its form "awc". Compressions make the messages smaller.

    Sends one message every H steps, and keeps three tensors per bucket. Every round must be the exact average: the
    topology complete. Choose ``bucket_cap_mb`` such that there are P buckets at least. Use it where even the averages
    of DiLoCo hold up training.

    Parameters
    ----------
    period : int
        H, the steps from a bucket's exchange to its next, at least 1.
    parts : int
        P, at least 1 and at most H.
    overlap : int
        s, the steps that messages have, at least 1 and at most H.
    local_share : float
        :math:`\beta`, from 0 and below 1: how much of its own values a rank keeps.
    outer_lr : float
        Above 0.
    outer_momentum : float
        From 0, below 1.

    Raises
    ------
    ValueError
        One of them is not what it may be.

    References
    ----------
    Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a distributed free lunch", 2025,
    algorithm 2.
    """

    keeps: ClassVar[Mapping[str, Resized]] = {**DiLoCo.keeps, SENT: "mean"}

    def __init__(
        self,
        period: int = 50,
        parts: int = 4,
        overlap: int = 5,
        local_share: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__(period, outer_lr, outer_momentum, form="awc")
        self.parts, self.overlap = check_period("parts", parts), check_period("overlap", overlap)
        self.local_share = check_fraction("local_share", local_share)
        for name, value in (("parts", parts), ("overlap", overlap)):
            if value > period:
                raise ValueError(f"{name} must be at most period={period}, got {value}; choose a longer period")

    def schedule(self, topology: Topology) -> Topology:
        return topology

    def is_exchanged(self, bucket: int, step: int) -> bool:
        first = bucket % self.parts * self.period // self.parts
        return (step + 1 - first) % self.period == 0 and step + 1 > first

    def begin(self, bucket: BucketView) -> None:
        super().begin(bucket)
        bucket.kept[SENT].copy_(bucket.values)

    def updated(self, bucket: BucketView) -> None:
        if bucket.exchanges:
            bucket.kept[SENT].copy_(bucket.values)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        self.step_anchor_(bucket, bucket.kept[SENT] + got[VALUES].difference)
        anchor = bucket.kept[ANCHOR]
        bucket.values.copy_(anchor + self.local_share * (bucket.values - anchor))

    def describe(self) -> str:
        return (
            f"{type(self).__name__}(period={self.period} parts={self.parts} overlap={self.overlap} "
            f"local_share={self.local_share:g} outer_lr={self.outer_lr:g} outer_momentum={self.outer_momentum:g})"
        )
