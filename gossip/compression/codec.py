"""What a bucket's messages are on the wire: the contract of compressions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from gossip.compression.part_memory import all_finite
from topologies import Round, Topology

Messages = Mapping[int, torch.Tensor]
"""Tensors that go to ranks, or come from them, by rank."""
Parts = Iterator[tuple[slice, torch.Tensor]]
"""A flat tensor bit by bit: where each part belongs, and its values, which are gone when the next one is asked for."""
NO_MEMORY = "int8, which remembers nothing"
"""What to choose instead of a compression that builds on earlier exchanges."""
#: On a CPU so many elements are worked on at a time: what one operation writes is in the cache when the next reads it.
CHUNK_NUMEL = 2**18


class Compression(ABC):
    """How buckets become messages; the same on every rank. An object of constants: :meth:`codec` holds the state.

    Attributes
    ----------
    follows_up : bool
        Whether an exchange may need further messages after the first: see :meth:`Codec.follow_up`.
    """

    follows_up: ClassVar[bool] = False

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

    def messages(self, values: torch.Tensor) -> torch.Tensor | None:
        """The messages of several replicas at once, where a message is the values themselves in some dtype.

        Parameters
        ----------
        values : Tensor, [..., numel]
            Leading dimensions are replicas.

        Returns
        -------
        Tensor, [..., numel], or None
            What :meth:`Codec.encode` makes of each; ``values`` itself if that is what is sent. None where a message is
            something else: then every replica needs a codec of its own.
        """
        del values
        return None

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
    """

    def __init__(
        self,
        index: int,
        block: torch.Tensor,
        views: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]] | None = None,
    ) -> None:
        self.index = index
        self.numel = block.numel()
        self.dtype = block.dtype
        self.device = block.device
        self.views = tuple(views) if views is not None else (((self.numel,), (1,), 0),)

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """In which messages are summed: float64 for itself, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Codec(ABC):
    r"""One bucket's messages at one rank, one exchange at a time.

    What rank i mixes in is :math:`\sum_j W_{ij} (m_j - m_i)`, where the message :math:`m_j` is what *every* rank makes
    of rank j's bytes, j itself included. So the mean over ranks is kept whatever a message lost, as long as W is doubly
    stochastic and two ranks decode the same bytes to the same values.

    The order of calls is :meth:`encode`, :meth:`receive_buffers`, :meth:`follow_up`, :meth:`is_finite`,
    :meth:`decode`; then the next exchange. The last three come exactly once per exchange.
    Random numbers are drawn from (seed, step, bucket, rank) alone.
    """

    @property
    @abstractmethod
    def sent(self) -> torch.Tensor | None:
        """This rank's own message :math:`m_i`, [numel], until the next :meth:`encode`; None if it is no one tensor."""

    @abstractmethod
    def encode(self, values: torch.Tensor, round_: Round, step: int) -> Messages:
        """Make the message of ``values``, which may change afterwards.

        Parameters
        ----------
        values : Tensor, [numel]
        round_ : Round
            One in which this rank has a peer.
        step : int

        Returns
        -------
        mapping of int to Tensor
            By rank that reads this one: contiguous, on the device of ``values``, and left as it is until
            :meth:`decode`.
        """

    @abstractmethod
    def receive_buffers(self) -> Messages:
        """Where the messages of the exchange that was encoded last are to arrive, by rank that this one reads."""

    def follow_up(self, sent: Messages, received: Messages) -> Iterator[tuple[Messages, Messages]]:
        """Further messages that the exchange needs: each time, what goes to whom and where what arrives is to be put.

        Runs beside the training, once all messages have arrived; what was yielded has arrived when it goes on. Both
        ends of an edge must expect the same.

        Parameters
        ----------
        sent, received : mapping of int to Tensor
            As on the wire: with a device whose messages go through the host's memory, these are there. ``received`` may
            be changed; it is what :meth:`decode` gets.
        """
        del sent, received
        yield from ()

    @abstractmethod
    def is_finite(self, received: Messages) -> bool:
        """Whether what arrived is finite. Runs beside the training, after :meth:`follow_up`; only on a CPU.

        Where it is, but this rank's own message is not, :meth:`decode` yields something that is not.
        """

    @abstractmethod
    def decode(self, received: Messages) -> Parts:
        r"""Yield :math:`\sum_j W_{ij} (m_j - m_i)`, [numel], in the dtype of accumulation; part by part, in order.

        A part is the caller's, to change it too, until the next one; none at all stand for zeros. It must be run to its
        end.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the next exchange needs of the ones before, as plain data and tensors; copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 -- most have none
        """Go on from there."""


def chunks(numel: int, device: torch.device) -> Iterator[slice]:
    """The parts of a flat tensor that are worked on one after the other: small ones on a CPU."""
    size = CHUNK_NUMEL if device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


class WholeCodec(Codec):
    """A codec that makes the difference as a whole, in memory that it keeps, beside the training where it can."""

    def __init__(self, bucket: BucketShape) -> None:
        self._difference = torch.zeros(bucket.numel, dtype=bucket.accumulation_dtype, device=bucket.device)
        self._is_taken_in = False

    def is_finite(self, received: Messages) -> bool:
        self._take_in(received)
        self._is_taken_in = True
        return all_finite(self._difference)

    def decode(self, received: Messages) -> Parts:
        if not self._is_taken_in:
            self._take_in(received)
        self._is_taken_in = False
        for part in chunks(self._difference.numel(), self._difference.device):
            yield part, self._difference[part]

    @abstractmethod
    def _take_in(self, received: Messages) -> None:
        """Fill ``_difference``. Called once per exchange."""
