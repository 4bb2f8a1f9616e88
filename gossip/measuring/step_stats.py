"""The cost of a step on this rank, measured while it is made."""

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch


@dataclass(frozen=True)
class StepStats:
    """The cost of one step on this rank. Times are measured on the host and do not include work that a GPU has pending.

    Attributes
    ----------
    step : int
        The step, counted from 0.
    exposed_wait_s : float
        Seconds for which training was blocked waiting for peers.
    bytes_sent : int
        The bytes that this rank sends for the round that it launched in this step.
    forward_s, backward_s, update_s : float
        Seconds inside the forward passes and the backward passes that belong to the step, and in the optimizer. In
        fused mode ``backward_s`` contains ``update_s`` and the exposed wait.
    overlapped_s : float
        Seconds for which exchanges that ended in this step were in flight while this rank kept training, summed over
        buckets.
    bytes_by_peer : mapping of int to int
        ``bytes_sent`` by target rank. Those of an all-reduce are split evenly over its group.
    wait_by_peer_s : mapping of int to float
        How long this rank was blocked until the message of each peer had arrived. An all-reduce is charged in full to
        every member.
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
        Messages of earlier steps that were mixed in now, because ``soft_deadline`` kept those steps from waiting for
        them.
    unusual_by_peer : mapping of int to int
        By rank, the number of messages that were far beyond what is usual, see ``max_difference``. A rank counts its
        own under its own number.
    num_clipped : int
        The differences to a peer's message that were clipped, see ``max_difference``.
    mean_moved : float
        By how much clipping along directed edges has moved the mean over ranks: the sum of Euclidean norms, of which
        each rank counts those of its own edges.
    generation : int
        The number of times that the set of training ranks has changed, with ``on_peer_loss="continue"``.
    is_store_lost : bool
        Whether the key-value store does not reply, with ``on_peer_loss="continue"``: the next rank that is lost or
        leaves then ends the training of all.
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
    unusual_by_peer: Mapping[int, int] = field(default_factory=dict)
    num_clipped: int = 0
    mean_moved: float = 0.0
    generation: int = 0
    is_store_lost: bool = False

    @property
    def epoch(self) -> int:
        """Deprecated, use ``generation``."""
        warnings.warn("StepStats.epoch is deprecated; use generation", DeprecationWarning, stacklevel=2)
        return self.generation

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as plain data for a record."""
        return asdict(self)


@dataclass(frozen=True)
class VirtualStats:
    """The cost of one step of all replicas.

    Attributes
    ----------
    step : int
        The step, counted from 0.
    bytes_sent : float
        The bytes that a rank of a cluster would send for the round launched in this step: the mean over ranks.
    num_skipped : int
        Replicas that were not updated, or only in part, because their gradients were not finite.
    num_refused : int
        Replicas that did not mix, or only in part, because a message was not finite.
    """

    step: int
    bytes_sent: float
    num_skipped: int
    num_refused: int


class Meter:
    """Accumulates the costs of one step while it is made."""

    def __init__(self) -> None:
        self.forward_s = self.backward_s = self.update_s = self.exposed_wait_s = self.overlapped_s = 0.0
        self.bytes_sent = self.num_refused = self.num_skipped = self.num_late = self.generation = self.num_clipped = 0
        self.mean_moved, self.is_store_lost = 0.0, False
        self.bytes_by_peer: defaultdict[int, int] = defaultdict(int)
        self.wait_by_peer_s: defaultdict[int, float] = defaultdict(float)
        self.unusual_by_peer: defaultdict[int, int] = defaultdict(int)
        self.gradient_norms: list[torch.Tensor | float] = []
        self.squared_distances: list[torch.Tensor | float] = []

    def gradient_norm(self) -> float | None:
        """Return the norm of all gradients seen so far; waits for the device on which they are."""
        return math.hypot(*map(float, self.gradient_norms)) if self.gradient_norms else None

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured between two steps and counts for the next one; without times."""
        kept = {name: getattr(self, name) for name in ("num_refused", "num_clipped", "mean_moved")}
        squares = [float(square) for square in self.squared_distances]
        return {**kept, "squared_distances": squares, "unusual_by_peer": dict(self.unusual_by_peer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        vars(self).update(state)
        self.squared_distances = list(self.squared_distances)
        self.unusual_by_peer = defaultdict(int, self.unusual_by_peer)

    def stats(self, step: int) -> StepStats:
        """Return all statistics; waits for the device."""
        squares = [float(square) for square in self.squared_distances]
        found = {entry.name: getattr(self, entry.name) for entry in fields(StepStats) if hasattr(self, entry.name)}
        computed: dict[str, Any] = {
            "step": step,
            "gradient_norm": self.gradient_norm(),
            "consensus_distance_estimate": math.sqrt(sum(squares)) if squares else None,
        }
        by_peer = {name: dict(each) for name, each in found.items() if isinstance(each, dict)}
        return StepStats(**{**found, **by_peer, **computed})
