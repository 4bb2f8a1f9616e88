"""One exchange of one bucket, from what is sent to what the messages of the peers are decoded to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NamedTuple

import torch

from gossip.compression.part_memory import all_finite
from gossip.errors import GossipError

Messages = Mapping[int, torch.Tensor]
"""Tensors that go to ranks, or come from them, by rank."""
Parts = Iterator[tuple[slice, torch.Tensor]]
"""A flat tensor bit by bit: where each part belongs, and its values, which are gone when the next one is asked for."""
#: On a CPU so many elements are worked on at a time: what one operation writes is in the cache when the next reads it.
CHUNK_NUMEL = 2**18
_NOTHING = nullcontext()


class Turn:
    """Messages that leave together, and room for those that come.

    Parameters
    ----------
    sent : mapping of int to Tensor
        By rank that it goes to: contiguous, and left as it is until the exchange has ended.
    make_buffers : callable
        Makes ``receive_buffers``. Not called where no message is to be put anywhere.
    following : mapping of int to Tensor, optional
        The ``receive_buffers`` of the next turn, where these are known by now: so it can be waited for from now on, and
        what it waits for travels without asking first whether there is room. Of the opening alone.
    making : iterator of int, optional
        Makes ``sent``, from the beginning of each message on, and yields how many of their bytes are there; of the
        opening alone. Without it they are there at once.
    make_accumulator : callable, optional
        Given where the messages are plain values of the same kind on all ranks, which may be added on the wire: memory
        for the weighted sum, [numel], in the dtype of accumulation.

    Attributes
    ----------
    receive_buffers : mapping of int to Tensor
        Where the messages are to be put, by rank that they come from.
    lost : collection of int
        Set by whoever carries a turn after the opening: ranks whose messages will never come.
    """

    def __init__(
        self,
        sent: Messages,
        make_buffers: Callable[[], Messages],
        make_accumulator: Callable[[], torch.Tensor] | None = None,
        *,
        following: Messages = MappingProxyType({}),
        making: Iterator[int] = iter(()),  # noqa: B008 -- it is empty, for all alike
    ) -> None:
        self.sent = sent
        self.following = following
        self.making = making
        self.make_accumulator = make_accumulator
        self.lost: Collection[int] = ()
        self._make_buffers = make_buffers
        self._buffers: Messages | None = None

    @property
    def receive_buffers(self) -> Messages:
        if self._buffers is None:
            self._buffers = self._make_buffers()
        return self._buffers


class Delivery:
    r"""What has become of the messages of a turn.

    Parameters
    ----------
    sent, received : mapping of int to Tensor
        This rank's messages and those of its peers, in the turn's buffers or elsewhere, on the device of the bucket.
        There ``received`` is complete only when the parts of the :class:`Arrival` are asked for. Peers whose messages
        are lost are not among them: what they would have added is left out.
    on_host : (mapping of int to Tensor, mapping of int to Tensor), optional
        The same two in the memory of the host, if they have gone through it.
    total : Tensor, optional
        In place of ``received``: the accumulator, which holds :math:`\sum_j W_{ij} m_j`.
    """

    def __init__(
        self,
        sent: Messages,
        received: Messages,
        *,
        on_host: tuple[Messages, Messages] | None = None,
        total: torch.Tensor | None = None,
    ) -> None:
        self.received = received
        self.total = total
        self._sent = sent
        self._on_host = on_host

    @property
    def on_host(self) -> tuple[Messages, Messages]:
        """What was sent and what was received, where the host sees it, and may change what was received."""
        if self._on_host is None:
            sent, received = (
                {rank: message.cpu() for rank, message in messages.items()} for messages in (self._sent, self.received)
            )
            self._on_host = sent, received
        return self._on_host


class Arrival(NamedTuple):
    r"""What has arrived in one exchange.

    Attributes
    ----------
    parts : iterator of (slice, Tensor)
        :math:`\sum_j W_{ij} (m_j - m_i)`, [numel], in the dtype of accumulation; part by part, in order. A part is the
        caller's, to change it too, until the next one; none at all stand for zeros. To be run to its end, before the
        bucket's next exchange.
    is_finite : bool
        Whether all that arrived is; True where the host does not see it. Where it is, but this rank's own message is
        not, ``parts`` yields something that is not.
    """

    parts: Parts
    is_finite: bool

    @classmethod
    def of(cls, difference: torch.Tensor) -> Arrival:
        """What arrived, decoded already as a whole into memory of the caller's, which the parts are views of."""
        return cls(
            ((part, difference[part]) for part in chunks(difference.numel(), difference.device)),
            finite_on_host([difference]),
        )


Turns = Generator[Turn, Delivery, Arrival]
"""Yields turns, gets what became of each, and returns what has arrived."""


class Conversation:
    """One exchange of one bucket at one rank.

    Made by :meth:`gossip.Codec.exchange`. Whoever carries it delivers the messages of its ``opening``, then those of
    each turn of :meth:`proceed`, and has its ``arrival`` in the end::

        for turn in conversation.proceed(Delivery(opening.sent, opening.receive_buffers)):
            ...  # send turn.sent, fill turn.receive_buffers
        conversation.arrival

    Both ends of an edge expect the same turns.
    """

    def __init__(self, turns: Turns) -> None:
        with _no_gradients():
            self._opening = next(turns)
        self._turns: Turns | None = turns
        self._arrival: Arrival | None = None

    @property
    def opening(self) -> Turn:
        """The first turn, with its messages."""
        for _ in self.make_opening():
            pass
        return self._opening

    @property
    def unmade_opening(self) -> Turn:
        """The first turn, for those who call :meth:`make_opening` before they leave the values to others."""
        return self._opening

    def make_opening(self) -> Iterator[int]:
        """Make the messages of the opening; how many bytes of each, from its beginning on, are there by now."""
        while True:
            with _no_gradients():
                num_bytes = next(self._opening.making, None)
            if num_bytes is None:
                return
            yield num_bytes

    def proceed(self, delivery: Delivery) -> Iterator[Turn]:
        """The turns after the opening, which has been delivered; what a turn sends has arrived when the next is asked.

        May run beside the training. Messages of these turns are in the memory of the host, on both sides.

        Raises
        ------
        GossipError
            It has proceeded before.
        """
        if self._turns is None:
            raise GossipError("a conversation proceeds once; begin the next exchange with codec.exchange(...)")
        turns, self._turns = self._turns, None
        while True:
            try:
                with _no_gradients():
                    turn = turns.send(delivery)
            except StopIteration as end:
                self._arrival = end.value
                return
            yield turn
            received = {rank: buffer for rank, buffer in turn.receive_buffers.items() if rank not in turn.lost}
            delivery = Delivery(turn.sent, received)

    @property
    def arrival(self) -> Arrival:
        """What has arrived.

        Raises
        ------
        GossipError
            Not everything has been delivered.
        """
        if self._arrival is None:
            raise GossipError(
                "this exchange has not ended: deliver its messages, and run conversation.proceed(...) to its end first"
            )
        return self._arrival


def _no_gradients() -> AbstractContextManager[object]:
    """Nothing to do in a backward pass, where they are off."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def carry(conversations: Mapping[int, Conversation]) -> int:
    """Carry conversations between ranks of one process, to their end.

    Parameters
    ----------
    conversations : mapping of int to Conversation
        By rank; all who have a peer in the round.

    Returns
    -------
    int
        How many bytes were sent.

    Raises
    ------
    GossipError
        A rank sends what its peer does not expect: the codec's turns differ between the two ends of an edge.
    """
    turns = {rank: conversation.opening for rank, conversation in conversations.items()}
    num_bytes = _hand_over(turns)
    under_way = {
        rank: conversation.proceed(Delivery(turns[rank].sent, turns[rank].receive_buffers))
        for rank, conversation in conversations.items()
    }
    while under_way:
        turns = {rank: turn for rank, more in under_way.items() if (turn := next(more, None)) is not None}
        under_way = {rank: under_way[rank] for rank in turns}
        num_bytes += _hand_over(turns)
    return num_bytes


def _hand_over(turns: Mapping[int, Turn]) -> int:
    """Put what is sent where it is expected; how many bytes that were."""
    sent = {(source, target): message for source, turn in turns.items() for target, message in turn.sent.items()}
    expected = {
        (source, target): buffer for target, turn in turns.items() for source, buffer in turn.receive_buffers.items()
    }
    for edge in sent.keys() ^ expected.keys():
        raise GossipError(
            f"rank {edge[0]} {'sends' if edge in sent else 'does not send'} rank {edge[1]} a message that it "
            f"{'does not expect' if edge in sent else 'expects'}: a codec's turns must be the same at both ends"
        )
    for (source, target), message in sent.items():
        buffer = expected[source, target]
        if (message.shape, message.dtype) != (buffer.shape, buffer.dtype) or not message.is_contiguous():
            raise GossipError(
                f"rank {source} sends rank {target} {tuple(message.shape)} of {message.dtype}, which expects "
                f"{tuple(buffer.shape)} of {buffer.dtype}: messages must be contiguous, and alike at both ends"
            )
        buffer.copy_(message)
    return sum(message.nbytes for message in sent.values())


def arrived(weights: Mapping[int, float], received: Messages) -> dict[int, float]:
    """The weights of those peers whose messages were not lost."""
    return {source: weight for source, weight in weights.items() if source in received}


def chunks(numel: int, device: torch.device) -> Iterator[slice]:
    """The parts of a flat tensor that are worked on one after the other: small ones on a CPU."""
    size = CHUNK_NUMEL if device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


def finite_on_host(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all are finite, as far as they are in the memory of the host: elsewhere it would hold up the host."""
    return all(not tensor.is_cpu or all_finite(tensor) for tensor in tensors)
