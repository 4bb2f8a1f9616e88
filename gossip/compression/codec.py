"""How a bucket becomes messages on the wire: the contract of compressions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from gossip.compression.conversation import Arrival, Conversation, Parts, Turns, chunks
from gossip.compression.stacked_codec import StackedCodec
from topologies import Round, Topology

NO_MEMORY = "int8, which remembers nothing"
"""What to choose instead of a compression that builds on earlier exchanges."""


class Compression(ABC):
    """How buckets become messages; the same on every rank. An object of constants: :meth:`codec` holds the state.

    Attributes
    ----------
    follows_up : bool
        Whether an exchange may need further turns after its opening: see :meth:`Codec.turns`.
    delivers : float
        The share of a difference between two ranks that an exchange delivers, where the rest follows in later ones; 1:
        all of it, but for rounding.
    adds_on_wire : bool
        Whether messages are the values as they are, so that those of several ranks may also be added on the wire.
    """

    follows_up: ClassVar[bool] = False
    delivers: float = 1.0
    adds_on_wire: ClassVar[bool] = False

    def check(self, topology: Topology) -> None:  # noqa: B027 -- most serve all
        """Refuse a topology that it cannot serve.

        Raises
        ------
        ValueError
            Says why, and what to take instead.
        """

    @abstractmethod
    def codec(self, bucket: BucketShape, rank: int) -> Codec:
        """The state of one bucket at one rank. Local."""

    def stacked_codec(self, bucket: BucketShape, world_size: int) -> StackedCodec | None:
        """The state of one bucket at all ranks, where these are replicas of one process on one device. Local.

        Returns
        -------
        StackedCodec or None
            It makes what :meth:`codec` makes for each rank, and is faster. None: every replica gets a codec of its own.
        """
        del bucket, world_size
        return None

    def messages(self, values: torch.Tensor) -> torch.Tensor | None:
        """The messages of several replicas at once, where a message is the values themselves in some dtype.

        Parameters
        ----------
        values : Tensor, [..., numel]
            Leading dimensions are replicas.

        Returns
        -------
        Tensor, [..., numel], or None
            What a :class:`Codec` sends for each; ``values`` itself if that is what is sent. None where a message is
            something else.
        """
        del values
        return None

    @property
    def shows_messages(self) -> bool:
        """Whether what a rank sends is one tensor for all peers, the :attr:`Codec.sent` of its codecs."""
        return self.codec(BucketShape(0, torch.zeros(1)), 0).sent is not None

    @abstractmethod
    def describe(self) -> str:
        """Name and constants, to be compared between ranks and logged."""


class BucketShape:
    """What a codec may know of its bucket.

    Attributes
    ----------
    index : int
        Its place in launch order.
    numel : int
        Length of the flat values.
    dtype, device
        Of the values.
    views : sequence of (shape, stride, offset)
        Where each parameter lies in the flat values; one flat view where nothing is known.
    memory : callable
        ``(message, step) -> Tensor``: where a message like that one is best made in this step, for it to travel fast;
        by default where it lies. Only for a message that goes to all peers alike.
    start : Tensor, [numel], or None
        Values that all ranks begin with, as they are when the codec is made: how far a rank has come from there tells
        how far apart two of them may be. None: they may be any distance apart.
    """

    def __init__(
        self,
        index: int,
        block: torch.Tensor,
        views: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]] | None = None,
        *,
        memory: Callable[[torch.Tensor, int], torch.Tensor] = lambda message, _: message,
        start: torch.Tensor | None = None,
    ) -> None:
        self.index = index
        self.numel = block.numel()
        self.dtype = block.dtype
        self.device = block.device
        self.views = tuple(views) if views is not None else (((self.numel,), (1,), 0),)
        self.memory = memory
        self.start = start

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """In which messages are summed: float64 for itself, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Codec(ABC):
    r"""One bucket's messages at one rank, one exchange after the other.

    What rank i mixes in is :math:`\sum_j W_{ij} (m_j - m_i)`, where the message :math:`m_j` is what *every* rank makes
    of rank j's bytes, j itself included. So the mean over ranks is kept whatever a message lost, as long as W is doubly
    stochastic and two ranks decode the same bytes to the same values.

    Random numbers are drawn from (seed, step, bucket, rank) alone.
    """

    @property
    @abstractmethod
    def sent(self) -> torch.Tensor | None:
        """This rank's own message :math:`m_i`, [numel], until the next exchange; None if it is no one tensor."""

    @abstractmethod
    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        """One exchange, as a generator: its order is that of its lines.

        It makes the message of ``values`` and yields it, with room for those of the peers, as the first
        :class:`gossip.Turn`; gets back what has become of it, a :class:`gossip.Delivery`; yields further turns, if it
        needs any; and returns the :class:`gossip.Arrival`. What stands before the first ``yield`` runs in the training
        thread, what follows beside the training, both without gradients, and the arrival's parts in the training thread
        again. Both ends of an edge must take the same turns.

        Parameters
        ----------
        values : Tensor, [numel]
            They may change after the first ``yield``, or when that turn's ``making`` has ended; to be deleted before
            it, so that nothing keeps them longer.
        round_ : Round
            One in which this rank has a peer.
        step : int
        """

    def exchange(self, values: torch.Tensor, round_: Round, step: int) -> Conversation:
        """Make the messages of ``values``, and lead their exchange. One at a time. Local; see :meth:`turns`."""
        conversation = self.begin(values, round_, step)
        for _ in conversation.make_opening():
            pass
        return conversation

    def begin(self, values: torch.Tensor, round_: Round, step: int) -> Conversation:
        """The same, but ``values`` are needed until the messages of the conversation's ``opening`` are made."""
        return Conversation(self.turns(values, round_, step))

    def state_dict(self) -> dict[str, Any]:
        """What the next exchange needs of the ones before, as plain data and tensors; copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 -- most have none
        """Go on from there."""


class WholeCodec(Codec):
    """A codec that makes the difference as a whole, in memory that it keeps, beside the training where it can."""

    def __init__(self, bucket: BucketShape) -> None:
        self._difference = torch.zeros(bucket.numel, dtype=bucket.accumulation_dtype, device=bucket.device)

    def _arrival(self, take_in: Callable[[], None]) -> Arrival:
        """What has arrived, once ``take_in`` has filled ``_difference``; called once, when the messages are there."""
        if self._difference.is_cpu:
            take_in()
            return Arrival.of(self._difference)
        return Arrival(self._parts_after(take_in), is_finite=True)

    def _parts_after(self, take_in: Callable[[], None]) -> Parts:
        take_in()
        for part in chunks(self._difference.numel(), self._difference.device):
            yield part, self._difference[part]
