"""What a step cost on this rank, measured as it is made."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class StepStats:
    """What one step cost on this rank. Times are the host's; what a GPU still computes is not in them.

    Attributes
    ----------
    step : int
        Counted from 0.
    exposed_wait_s : float
        Seconds for which training stood still, waiting for peers.
    bytes_sent : int
        What this rank sends for the round that it launched in this step.
    forward_s, backward_s, update_s : float
        Seconds inside the forward passes and the backward passes that belong to the step, and in the optimizer. In
        fused mode ``backward_s`` contains ``update_s`` and the exposed wait.
    overlapped_s : float
        Seconds for which exchanges that ended in this step were under way while this rank trained on, over buckets.
    bytes_by_peer : mapping of int to int
        ``bytes_sent``, by the rank that they go to. An all-reduce's are split evenly over its group.
    wait_by_peer_s : mapping of int to float
        How long this rank stood still until the message of each peer had arrived. Of an all-reduce all members are
        charged the whole.
    consensus_distance_estimate : float or None
        An estimate of the replicas' distance from their mean, from this step's messages alone; None if none arrived.
        See :meth:`gossip.GossipDataParallel.consensus_distance` for the exact one.
    gradient_norm : float or None
        Euclidean norm of all gradients of this rank, before clipping; None without gradients.
    num_refused : int
        Buckets whose arrived messages were not finite and were not mixed in.
    num_skipped : int
        Buckets that were not updated because their gradients were not finite.
    num_late : int
        Messages of earlier steps that were mixed in now, as ``soft_deadline`` had not let these wait for them.
    epoch : int
        Grows whenever the ranks that train change, with ``on_peer_loss="continue"``.
    """

    step: int
    exposed_wait_s: float
    bytes_sent: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    overlapped_s: float = 0.0
    bytes_by_peer: Mapping[int, int] = field(default_factory=dict)
    wait_by_peer_s: Mapping[int, float] = field(default_factory=dict)
    consensus_distance_estimate: float | None = None
    gradient_norm: float | None = None
    num_refused: int = 0
    num_skipped: int = 0
    num_late: int = 0
    epoch: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a record."""
        return asdict(self)


@dataclass(frozen=True)
class VirtualStats:
    """What one step of all replicas did.

    Attributes
    ----------
    step : int
        Counted from 0.
    bytes_sent : float
        What a rank of a cluster would send for the round that was launched in this step: the mean over ranks.
    num_skipped : int
        Replicas that were not updated, or in part, because their gradients were not finite.
    num_refused : int
        Replicas that did not mix, or in part, because a message was not finite.
    """

    step: int
    bytes_sent: float
    num_skipped: int
    num_refused: int


class Meter:
    """Adds up one step's costs while it is made."""

    def __init__(self) -> None:
        self.forward_s = self.backward_s = self.update_s = 0.0
        self.exposed_wait_s = self.overlapped_s = 0.0
        self.bytes_sent = self.num_refused = self.num_skipped = self.num_late = self.epoch = 0
        self.bytes_by_peer: defaultdict[int, int] = defaultdict(int)
        self.wait_by_peer_s: defaultdict[int, float] = defaultdict(float)
        self.gradient_norms: list[torch.Tensor | float] = []
        self.squared_distances: list[torch.Tensor | float] = []

    def gradient_norm(self) -> float | None:
        """Of all gradients seen so far; waits for the device on which they are."""
        return math.hypot(*map(float, self.gradient_norms)) if self.gradient_norms else None

    def state_dict(self) -> dict[str, Any]:
        """What has been measured between two steps, for the next one, and is no time: of messages combined early."""
        squares = [float(square) for square in self.squared_distances]
        return {"squared_distances": squares, "num_refused": self.num_refused}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Measure on from there."""
        self.squared_distances = list(state.get("squared_distances", ()))
        self.num_refused = state.get("num_refused", 0)

    def stats(self, step: int) -> StepStats:
        """All of it; waits for the device."""
        squares = [float(square) for square in self.squared_distances]
        return StepStats(
            step=step,
            exposed_wait_s=self.exposed_wait_s,
            bytes_sent=self.bytes_sent,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            update_s=self.update_s,
            overlapped_s=self.overlapped_s,
            bytes_by_peer=dict(self.bytes_by_peer),
            wait_by_peer_s=dict(self.wait_by_peer_s),
            consensus_distance_estimate=math.sqrt(sum(squares)) if squares else None,
            gradient_norm=self.gradient_norm(),
            num_refused=self.num_refused,
            num_skipped=self.num_skipped,
            num_late=self.num_late,
            epoch=self.epoch,
        )
