"""Watches for ranks whose values are finite but wrong: what is usual along each edge, and what is far beyond it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from loguru import logger

from gossip.measuring.step_stats import Meter

Edge = tuple[int, ...]
"""The ranks at the other end: one, or all whose messages arrive as one sum."""
Place = tuple[int, str]
"""A bucket and a channel."""

WARNS_ABOVE = 10.0
"""A message is unusual if its distance is more than this multiple of what is usual along its edge."""
SHARE_OF_NORM = 0.25  # below this share of the values' own norm no distance is worth a warning
_NUM_KNOWN = 4  # exchanges along an edge before anything is unusual there
_DECAY = 0.98  # of what is usual, per exchange
NUM_ASTRAY = 20  # exchanges without a break that are unusual; after as many it is not one rank, but a change for all
_GROWTH = 1.05  # of what is usual, per exchange from then on
_NUM_STUCK = 20
SAMPLE_NUMEL = 512
OWN_SHARE = 0.45  # of an unusual distance, if it was this rank that moved; of two ranks one has moved as far


@dataclass
class Usual:
    """What is usual along one edge: the largest distance in recent exchanges, which decays from one to the next.

    Both ends of an edge that exchange with each other compute the same from the distances that they have in common.
    """

    distance: float = 0.0
    num_known: int = 0  # exchanges in which the two messages differed as usual
    num_unusual: int = 0  # exchanges without a break that have been unusual

    @property
    def is_known(self) -> bool:
        """Whether there have been enough exchanges to tell what is usual."""
        return self.num_known >= _NUM_KNOWN

    def learn(self, distance: float, *, is_unusual: bool) -> None:
        """Take a distance into account; what is usual stays as it is while all are unusual, and then grows slowly."""
        self.num_unusual = self.num_unusual + 1 if is_unusual else 0
        if self.num_unusual > NUM_ASTRAY:
            self.distance *= _GROWTH
        elif distance > 0 and not is_unusual:
            self.distance = max(distance, self.distance * _DECAY)
            self.num_known += 1


class _Later(NamedTuple):
    """The squared distances of one exchange on a device: a copy that is under way to the host, after what moved."""

    round_index: int
    edges: tuple[Edge, ...]
    values: torch.Tensor
    is_complete: torch.Event


class OutlierDetector:
    r"""Compares each message that arrives with what is usual along its edge, and names the rank that is far off.

    The distance of an edge is :math:`\|m_j - m_i\|`, the Euclidean distance of the two ranks' messages in a bucket.
    Usual is the largest distance of recent exchanges along that edge, which decays by 2 % from one exchange to the
    next; along an edge that is new, what is usual for this rank. A message is unusual if its distance exceeds
    :const:`WARNS_ABOVE` times that, and a quarter of the norm of this rank's own values, less what these have moved,
    so that no change of the learning rate is mistaken for a fault. Where only the sum of several messages is known (an
    all-reduce, or a compression that sends increments), that sum is compared.

    Of the two ends of an edge the one whose own message has moved since its last exchange is the one that is off; how
    far is estimated from a sample of the values. A rank also notices if its own messages stay the same to the bit.

    Everything is local. On a GPU distances are read one exchange later, when they have long been computed, so that the
    host need not wait for the device.

    ``norm``, called with a bucket, returns the norm of this rank's own values.
    """

    def __init__(self, rank: int, norm: Callable[[int], float]) -> None:
        self._rank, self._norm = rank, norm
        self._usual: dict[Place, dict[Edge, Usual]] = {}
        self._messages: dict[int, OwnMessages] = {}
        self._later: dict[Place, _Later] = {}
        self._warned_at = -_NUM_STUCK

    # ------------------------------------------------------------------ this rank's own messages

    def moved(self, bucket: int) -> float:
        """Return an estimate of how far this rank's newest message for a bucket is from the one before."""
        return float(self._messages[bucket].moved) if bucket in self._messages else 0.0

    def send(
        self, bucket: int, message: torch.Tensor, step: int, meter: Meter, was_updated: Callable[[], bool]
    ) -> None:
        """Note the message, [numel], that this rank sends for a bucket of parameters.

        ``was_updated``, called if the message is the same as before, returns whether this step was to change the
        values; one with a learning rate of 0 or without gradients was not.
        """
        own = self._messages.setdefault(bucket, OwnMessages())
        own.note(message, was_updated)
        if min(messages.num_equal for messages in self._messages.values()) == _NUM_STUCK:
            meter.unusual_by_peer[self._rank] += 1
            for messages in self._messages.values():
                messages.num_equal += 1  # it is said once
            logger.warning(
                f"rank {self._rank}: step {step}: rank {self._rank} is stuck: it has sent the same message, to the "
                f"bit, in {_NUM_STUCK} exchanges, though it has a learning rate and gradients, and its peers differ "
                "from it; check what its optimizer and its hooks do, and its device"
            )

    # ------------------------------------------------------------------ what arrives

    def judge(self, place: Place, round_index: int, squares: Mapping[Edge, float | torch.Tensor], meter: Meter) -> None:
        """Compare what has arrived with what is usual, and warn."""
        own = self._messages.setdefault(place[0], OwnMessages())
        if (later := self._later.pop(place, None)) is not None:
            later.is_complete.synchronize()
            moved, *known = later.values.tolist()
            self._judge(place, later.round_index, dict(zip(later.edges, known, strict=True)), moved, meter)
        device = next((square.device for square in squares.values() if isinstance(square, torch.Tensor)), None)
        if device is None:
            on_host = {edge: float(square) for edge, square in squares.items()}
            self._judge(place, round_index, on_host, float(own.moved), meter)
            return
        numbers = [
            torch.as_tensor(value, device=device, dtype=torch.float64) for value in (own.moved, *squares.values())
        ]
        values = torch.stack(numbers).to("cpu", non_blocking=True)
        is_complete = torch.Event(device)
        is_complete.record()
        self._later[place] = _Later(round_index, tuple(squares), values, is_complete)

    def _judge(self, place: Place, round_index: int, squares: Mapping[Edge, float], moved: float, meter: Meter) -> None:
        edges = self._usual.setdefault(place, {})
        distances = {edge: math.sqrt(square) for edge, square in squares.items()}
        unusual: dict[Edge, float] = {}
        for edge, distance in distances.items():
            usual, anywhere = edges.setdefault(edge, Usual()), edges.setdefault((), Usual())
            measure = usual if usual.is_known else anywhere
            is_far = measure.is_known and not distance <= WARNS_ABOVE * measure.distance
            if is_far and distance > SHARE_OF_NORM * (self._norm(place[0]) - moved):
                unusual[edge] = distance / measure.distance
            for known in (usual, anywhere):
                known.learn(distance, is_unusual=edge in unusual)
        self._messages[place[0]].differs_by = max(distances.values(), default=0.0)
        if unusual:
            is_own = moved > OWN_SHARE * max(distances[edge] for edge in unusual)
            for rank in (self._rank,) if is_own else [rank for edge in unusual for rank in edge]:
                meter.unusual_by_peer[rank] += 1
            self._warn(round_index + 1, place[0], unusual, is_own=is_own)

    def _warn(self, step: int, bucket: int, unusual: Mapping[Edge, float], *, is_own: bool) -> None:
        if 0 < step - self._warned_at < _NUM_STUCK:
            return  # what has been mixed in is passed on
        self._warned_at = step
        for edge, multiple in unusual.items():
            is_single, own = len(edge) == 1, f"rank {self._rank}"
            one = f"rank {edge[0]}" if is_single else f"one of the ranks {', '.join(map(str, edge))}"
            other = f"that of {one}" if is_single else "the mean of their messages"
            device = "its device" if is_single or is_own else "the device of that rank, which says so itself"
            logger.warning(
                f"{own}: step {step}, bucket {bucket}: the values of {own if is_own else one} have jumped: {own}'s "
                f"message and {other} are {multiple:.3g} times as far apart as is usual along this edge; check "
                f"{device}, its learning rate and whatever else writes its parameters"
            )

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> list[Any]:
        """Return what is usual, as plain data; this rank's own messages are not part of it."""
        return [
            [*place, list(edge), usual.distance, usual.num_known, usual.num_unusual]
            for place, edges in self._usual.items()
            for edge, usual in edges.items()
        ]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._usual = {}
        for bucket, channel, edge, *numbers in state:
            self._usual.setdefault((bucket, channel), {})[tuple(edge)] = Usual(*numbers)


class OwnMessages:
    """This rank's messages for one bucket, one exchange after the other."""

    def __init__(self) -> None:
        self.moved: float | torch.Tensor = 0.0  # an estimate of how far the newest is from the one before
        self.num_equal = 0  # exchanges without a break with the same message, although it was to change
        self.differs_by = 0.0  # the largest distance to a peer's message in the newest exchange
        self._sample: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None

    def note(self, message: torch.Tensor, was_updated: Callable[[], bool]) -> None:
        """Compare a message with the one before."""
        stride = -(-message.numel() // SAMPLE_NUMEL)
        sample = message[::stride].clone()
        before, self._sample = self._sample, sample
        if before is None or before.shape != sample.shape:
            return
        moved = torch.dist(sample, before)
        scale = math.sqrt(message.numel() / sample.numel())
        self.moved = float(moved) * scale if moved.is_cpu else moved * scale
        # What is below this share of the values may be lost when it is added to them.
        is_equal = moved.is_cpu and self.moved == 0.0 and self.differs_by > 1e-5 * scale * float(sample.norm())
        if is_equal and was_updated() and (self._copy is None or torch.equal(self._copy, message)):
            self.num_equal += 1
            self._copy = message.clone() if self._copy is None else self._copy
        else:
            self.num_equal, self._copy = 0, None
