"""The contract of compressions: how a bucket becomes messages."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from gossip.compression.conversation import Arrival, Conversation, Parts, Turns, accumulation_dtype, chunks
from gossip.compression.stacked_codec import StackedCodec
from topologies import Round, Topology

NO_MEMORY = "int8, which keeps no state"
"""What to choose instead of a compression that depends on earlier exchanges; part of error texts."""


Clip = Callable[[Mapping[int, float], Callable[[int], float] | None], Mapping[int, float]]
"""Returns the factors by which to scale the difference to each source's message, from the lengths of these differences.

The second argument returns the smaller norm of a source's message and this rank's own; with None nothing is clipped
along an edge without a history. Lengths and norms are equal at both ends of an edge to the bit.
"""


View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Where a parameter lies in a bucket's flat values: shape, stride and offset."""


class Compression(ABC):
    """The encoding of buckets, equal on every rank. An instance holds constants, :meth:`codec` makes the state.

    Attributes
    ----------
    follows_up : bool
        Whether an exchange may need further turns after its opening, see :meth:`Codec.turns`.
    delivers : float
        The share of a difference between two ranks that one exchange delivers, the rest following in later ones; 1
        means all of it, except for rounding.
    adds_on_wire : bool
        Whether messages are the unchanged values, so that those of several ranks may also be added on the wire.
    can_clip : bool
        Whether both ends of an edge know both messages, and codecs clip the difference, see ``BucketShape.clip``.
    """

    follows_up: ClassVar[bool] = False
    delivers: float = 1.0
    adds_on_wire: ClassVar[bool] = False
    can_clip: ClassVar[bool] = False

    def check(self, topology: Topology) -> None:  # noqa: B027 -- most compressions accept all
        """Raise ValueError if the compression cannot serve the topology, with the reason and what to use instead."""

    @abstractmethod
    def codec(self, bucket: BucketShape, rank: int) -> Codec:
        """Return the state of one bucket on one rank. Local."""

    def stacked_codec(self, bucket: BucketShape, world_size: int) -> StackedCodec | None:
        """Return one codec that does what those of all ranks do, but faster, or None if there is none. Local.

        It is for replicas in one process on one device; with None each of them gets a :meth:`codec`.
        """
        del bucket, world_size
        return None

    def messages(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return what a :class:`Codec` sends for ``values``, [..., numel], each row a replica's. Local.

        ``values`` itself if they are sent as they are; None if a message is not the values in some dtype.
        """
        del values
        return None

    @property
    def shows_messages(self) -> bool:
        """Whether a rank sends one tensor to all peers, the :attr:`Codec.sent` of its codecs."""
        return self.codec(BucketShape(0, torch.zeros(1)), 0).sent is not None

    @abstractmethod
    def describe(self) -> str:
        """Return name and constants as text, to be compared between ranks and logged."""


class BucketShape:
    """The properties of a bucket that its codec knows.

    Attributes
    ----------
    index : int
        The bucket's place in launch order.
    numel : int
        The length of the flat values.
    dtype, device
        The dtype and the device of the values.
    views : sequence of (shape, stride, offset)
        Where each parameter lies in the flat values; a single flat view where nothing is known.
    memory : callable
        ``(message, step) -> Tensor``: returns the memory in which a message like the given one should be made in this
        step so that it travels fast; by default the message's own. Only for a message that goes to all peers alike.
    start : Tensor, [numel], or None
        The values with which all ranks started, as they are when the codec is made. The distance of a rank from there
        bounds the distance between two ranks. None if they may be any distance apart.
    measures : bool
        Whether an exchange is to tell the distance to each source's message, see :class:`gossip.Arrival`.
    clip : callable or None
        Called when the messages have arrived, see ``gossip.compression.codec.Clip``; what each source adds is scaled by
        its factor. Only for a compression with ``can_clip``.
    """

    def __init__(
        self,
        index: int,
        block: torch.Tensor,
        views: Sequence[View] | None = None,
        *,
        memory: Callable[[torch.Tensor, int], torch.Tensor] = lambda message, _: message,
        start: torch.Tensor | None = None,
        measures: bool = False,
        clip: Clip | None = None,
    ) -> None:
        self.index = index
        self.numel = block.numel()
        self.dtype = block.dtype
        self.device = block.device
        self.views = tuple(views) if views is not None else (((self.numel,), (1,), 0),)
        self.memory = memory
        self.start = start
        self.measures = measures
        self.clip = clip

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """The dtype in which messages are summed: float64 for float64 values, otherwise float32."""
        return accumulation_dtype(self.dtype)


def gaps(numel: int, views: Iterable[View]) -> list[slice]:
    """Return the ranges of ``numel`` flat values that none of the views has."""
    outside = torch.ones(numel + 2, dtype=torch.int8)
    outside[0] = outside[-1] = 0
    for shape, stride, offset in views:
        outside.as_strided(shape, stride, 1 + offset).fill_(0)
    changes = outside.diff().nonzero().flatten().tolist()
    return [slice(start, stop) for start, stop in zip(changes[::2], changes[1::2], strict=True)]


def generator(seed: int, *place: int) -> torch.Generator:
    """Return a CPU generator that is the same for the same numbers on every machine."""
    digest = hashlib.sha256(repr((seed, *place)).encode()).digest()
    source = torch.Generator()
    source.manual_seed(int.from_bytes(digest[:8], "little"))
    return source


class Codec(ABC):
    r"""The messages of one bucket on one rank, one exchange after the other.

    Rank i mixes in :math:`\sum_j W_{ij} (m_j - m_i)`, where the message :math:`m_j` is what *every* rank decodes from
    rank j's bytes, j itself included. So the mean over ranks is kept whatever a message lost, as long as W is doubly
    stochastic and all ranks decode the same bytes to the same values.

    Random numbers are drawn from (seed, step, bucket, rank) alone.
    """

    @property
    def sent(self) -> torch.Tensor | None:
        """This rank's own message :math:`m_i`, [numel], until the next exchange; None if it is not a single tensor."""
        return None

    @abstractmethod
    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        """Lead one exchange, as a generator that runs from top to bottom.

        It makes the message of ``values`` and yields it, with room for those of the peers, as the first
        :class:`gossip.Turn`. It is sent a :class:`gossip.Delivery`, which says what has become of the messages, yields
        further turns if it needs any, and returns the :class:`gossip.Arrival`. The code before the first ``yield`` runs
        in the training thread, the code after it concurrently with training, both without gradients; the arrival's
        parts run in the training thread again. Both ends of an edge must take the same turns.

        In ``round_``, which ends ``step``, this rank has a peer. The values, [numel], may change after the first
        ``yield``, or once that turn's ``making`` has ended; delete the name before it, so that nothing keeps them alive
        longer.
        """

    def exchange(self, values: torch.Tensor, round_: Round, step: int) -> Conversation:
        """Make the messages of ``values`` and start their exchange, one at a time. Local; see :meth:`turns`."""
        conversation = self.begin(values, round_, step)
        for _ in conversation.make_opening():
            pass
        return conversation

    def begin(self, values: torch.Tensor, round_: Round, step: int) -> Conversation:
        """Start an exchange like :meth:`exchange`, but ``values`` are needed until the opening's messages are made."""
        return Conversation(self.turns(values, round_, step))

    def completed(self, arrival: Arrival) -> Arrival:
        """Return what an exchange has brought, of which ``arrival`` may be a part. In the training thread."""
        return arrival

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what the next exchange needs of the previous ones, as plain data and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 -- most have none
        """Restore what :meth:`state_dict` returned."""


class WholeCodec(Codec):
    """A codec that computes the whole difference in memory that it keeps, concurrently with training if possible."""

    def __init__(self, bucket: BucketShape) -> None:
        self._difference = torch.zeros(bucket.numel, dtype=bucket.accumulation_dtype, device=bucket.device)

    def _arrival(self, take_in: Callable[[], None]) -> Arrival:
        """Return the arrival that ``take_in`` fills in; called once, when the messages have arrived."""
        if self._difference.is_cpu:
            take_in()
            return Arrival.of(self._difference)
        return Arrival(self._parts_after(take_in), is_finite=True)

    def _parts_after(self, take_in: Callable[[], None]) -> Parts:
        take_in()
        for part in chunks(self._difference.numel(), self._difference.device):
            yield part, self._difference[part]
