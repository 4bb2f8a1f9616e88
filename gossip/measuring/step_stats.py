"""The cost of a step on this rank, measured while it is made, and where the memory of a model goes."""

import math
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

READ_BY_OTHERS = "messages that others read on this machine"
Held = Iterable[object]


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


@dataclass(frozen=True)
class MemoryUse:
    """What a rank holds for training; ``str()`` is a table.

    Attributes
    ----------
    num_parameters : int
        The number of elements of all parameters, of a sharded module those of this rank's shard.
    bytes_of : mapping of str to int
        The bytes by purpose at the moment. Tensors that share memory count once, for the first purpose.
    in_training : mapping of str to int or None
        The bytes by purpose between steps, once each parameter has been updated and each bucket exchanged: predicted by
        what a step and exchanges of stand-ins without memory keep. None where these do not tell.
    num_spare_bytes : int
        How much more others can come to read, if a rank that is ahead does not wait for those that are still reading.
    """

    num_parameters: int
    bytes_of: Mapping[str, int]
    in_training: Mapping[str, int | None]
    num_spare_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes for all purposes at the moment."""
        return sum(self.bytes_of.values())

    def __str__(self) -> str:
        known = [num_bytes for num_bytes in self.in_training.values() if num_bytes is not None]
        rows = [(purpose, num_bytes, self.in_training[purpose]) for purpose, num_bytes in self.bytes_of.items()]
        in_all = "in all" if len(known) == len(rows) else "in all that is known"
        lines = [f"{'':41}  {'bytes now':>15}  per parameter  {'in training':>15}  per parameter"]
        for purpose, *columns in (*rows, (in_all, self.num_bytes, sum(known))):
            lines.append(f"{purpose:41}" + "".join(map(self._column, columns)))
        if self.num_spare_bytes:
            lines.append(f"{'more, while readers are behind: up to':41}{'':32}{self._column(self.num_spare_bytes)}")
        return "\n".join(lines)

    def _column(self, num_bytes: int | None) -> str:
        if num_bytes is None:
            return f"  {'known after the first steps':>30}"
        return f"  {num_bytes:>15,}  {num_bytes / max(1, self.num_parameters):>13.2f}"


def memory_use(num_parameters: int, held: Mapping[str, tuple[Held, Held | None]], num_buffers: int = 1) -> MemoryUse:
    """Return the memory of the tensors in the objects for each purpose, now and in training (None: unknown).

    ``num_buffers`` is how many messages others can come to read in place of one.
    """
    now = _num_bytes({purpose: objects for purpose, (objects, _) in held.items()})
    known = _num_bytes({purpose: objects for purpose, (_, objects) in held.items() if objects is not None})
    in_training = {purpose: known.get(purpose) for purpose in held}
    return MemoryUse(num_parameters, now, in_training, (num_buffers - 1) * known.get(READ_BY_OTHERS, 0))


def _num_bytes(held: Mapping[str, Held]) -> dict[str, int]:
    counted: set[tuple[torch.device, int]] = set()
    bytes_of = {}
    for purpose, objects in held.items():
        bytes_of[purpose] = 0
        for tensor in _tensors_in(objects, set()):
            storage = tensor.untyped_storage()
            place = tensor.device, storage._cdata if tensor.is_meta else storage.data_ptr()
            if place not in counted:
                counted.add(place)
                bytes_of[purpose] += storage.nbytes()
    return bytes_of


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, and in the attributes of what the compressions are made of."""
    if isinstance(value, torch.Tensor):
        yield value.to_local() if hasattr(value, "to_local") else value  # a DTensor, which takes long to import
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, str | bytes):
        parts = ()
    elif isinstance(value, Collection):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values() if type(value).__module__.startswith("gossip.") else ()
    for part in parts:
        yield from _tensors_in(part, seen)
