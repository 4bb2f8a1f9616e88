"""One exchange of one bucket, from what is sent to the decoded messages of the peers, and passes over memory."""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import torch

from gossip.errors import GossipError

Messages = Mapping[int, torch.Tensor]
"""Tensors that are sent to ranks or received from them, by rank."""
Parts = Iterator[tuple[slice, torch.Tensor]]
"""A flat tensor piece by piece: the place and values of each part, valid until the next part is requested."""
#: The number of elements processed at a time on a CPU: what one operation writes is still in the cache for the next.
CHUNK_NUMEL = 2**18
_NOTHING = nullcontext()
_thread = threading.local()


@dataclass(eq=False, repr=False)
class Turn:
    """Messages that are sent together, and room for those that are received.

    Parameters
    ----------
    sent : mapping of int to Tensor
        The messages by target rank: contiguous, and unchanged until the exchange has ended.
    make_buffers : callable
        Makes ``receive_buffers``. Not called where no message is stored.
    following : mapping of int to Tensor, optional
        The ``receive_buffers`` of the next turn, if they are already known: they can be awaited from now on, and their
        messages can be sent without first asking whether there is room. For the opening only.
    making : iterator of int, optional
        Makes ``sent``, from the beginning of each message on, and yields how many of its bytes are complete; for the
        opening only. Without it they are complete at once.
    make_accumulator : callable, optional
        Given if the messages are plain values of the same kind on all ranks, which may be added on the wire: returns
        memory for the weighted sum, [numel], in the accumulation dtype.

    Attributes
    ----------
    receive_buffers : mapping of int to Tensor
        Where the messages are to be stored, by source rank.
    lost : collection of int
        Set by whatever carries a turn after the opening: the ranks whose messages will never arrive.
    """

    sent: Messages
    make_buffers: Callable[[], Messages]
    make_accumulator: Callable[[], torch.Tensor] | None = None
    _: KW_ONLY
    following: Messages = field(default_factory=dict)
    making: Iterator[int] = iter(())  # noqa: RUF009 -- it is empty and can be shared
    lost: Collection[int] = field(default=(), init=False)

    @cached_property
    def receive_buffers(self) -> Messages:
        return self.make_buffers()


class Delivery:
    r"""The outcome of a turn's messages.

    Parameters
    ----------
    sent, received : mapping of int to Tensor
        This rank's messages and those of its peers, in the turn's buffers or elsewhere, on the device of the bucket. On
        a GPU, ``received`` is complete only when the parts of the :class:`Arrival` are requested. Peers whose messages
        are lost are missing: their contributions are left out.
    on_host : (mapping of int to Tensor, mapping of int to Tensor), optional
        The same two in host memory, if they have passed through it.
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
        """The sent and the received parts, in host memory; the received ones may be changed."""
        if self._on_host is None:
            sent, received = (
                {rank: message.cpu() for rank, message in messages.items()} for messages in (self._sent, self.received)
            )
            self._on_host = sent, received
        return self._on_host


class Arrival(NamedTuple):
    r"""The result of one exchange.

    Attributes
    ----------
    parts : iterator of (slice, Tensor)
        :math:`\sum_j W_{ij} (m_j - m_i)`, [numel], in the accumulation dtype, part by part, in order. A part belongs to
        the caller, who may change it, until the next one; no parts at all stand for zeros. The iterator must be
        exhausted before the bucket's next exchange.
    is_finite : bool
        Whether everything that arrived is finite; True where the host cannot see it. If it is True but this rank's own
        message is not finite, ``parts`` yields values that are not finite.
    squares : mapping of int to float or Tensor
        :math:`\|m_j - m_i\|^2` by source, complete when ``parts`` is exhausted; empty if only their weighted sum is
        known.
    """

    parts: Parts
    is_finite: bool
    squares: Mapping[int, float | torch.Tensor] = MappingProxyType({})

    @classmethod
    def of(cls, difference: torch.Tensor) -> Arrival:
        """Return an arrival whose parts are views of ``difference``, which is decoded and owned by the caller."""
        return cls(
            ((part, difference[part]) for part in chunks(difference.numel(), difference.device)),
            finite_on_host([difference]),
        )


Turns = Generator[Turn, Delivery, Arrival]
"""A generator that yields turns, is sent what became of each, and returns what has arrived."""


class Conversation:
    """One exchange of one bucket on one rank.

    Made by :meth:`gossip.Codec.exchange`. A transport delivers the messages of its ``opening``, then those of each turn
    of :meth:`proceed`, and in the end reads its ``arrival``::

        for turn in conversation.proceed(Delivery(opening.sent, opening.receive_buffers)):
            ...  # send turn.sent, fill turn.receive_buffers
        conversation.arrival

    Both ends of an edge expect the same turns.
    """

    def __init__(self, turns: Turns) -> None:
        with _no_gradients():
            #: The first turn, for callers that call :meth:`make_opening` before the values may change.
            self.unmade_opening = next(turns)
        self._turns: Turns | None = turns
        self._arrival: Arrival | None = None

    @property
    def opening(self) -> Turn:
        """The first turn, with its messages."""
        for _ in self.make_opening():
            pass
        return self.unmade_opening

    def make_opening(self) -> Iterator[int]:
        """Make the messages of the opening, and yield how many bytes from the start of each are complete."""
        while True:
            with _no_gradients():
                num_bytes = next(self.unmade_opening.making, None)
            if num_bytes is None:
                return
            yield num_bytes

    def proceed(self, delivery: Delivery) -> Iterator[Turn]:
        """Yield the turns after the opening, which has been delivered.

        The messages of a turn must have arrived when the next turn is requested. May run concurrently with training.
        Messages of these turns are in host memory, on both sides. Raises GossipError: it has been called before.
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
        """The result of the exchange. Raises GossipError: not everything has been delivered."""
        if self._arrival is None:
            raise GossipError(
                "this exchange has not ended: deliver its messages, and run conversation.proceed(...) to its end first"
            )
        return self._arrival


def _no_gradients() -> AbstractContextManager[object]:
    """Disable gradients; nothing to do in a backward pass, where they are disabled already."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def rehearse_arrival(conversation: Conversation, sources: Iterable[int]) -> None:
    """Lead a conversation on the meta device to its end, as if messages of zeros arrived from these ranks."""
    sent = conversation.opening.sent
    like = next(iter((sent or conversation.opening.receive_buffers).values()))
    received = {source: torch.empty_like(like) for source in sources}
    on_host = [{rank: torch.zeros_like(each, device="cpu") for rank, each in part.items()} for part in (sent, received)]
    for turn in conversation.proceed(Delivery(sent, received, on_host=(on_host[0], on_host[1]))):
        for buffer in turn.receive_buffers.values():
            buffer.zero_()
    collections.deque(conversation.arrival.parts, maxlen=0)


def carry(conversations: Mapping[int, Conversation]) -> int:
    """Carry the conversations of all ranks that have a peer, by rank, to their end, and return the bytes sent.

    Raises GossipError: a rank sends what its peer does not expect.
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
    """Copy what is sent to where it is expected, and return the number of bytes."""
    sent = {(source, target): message for source, turn in turns.items() for target, message in turn.sent.items()}
    expected = {
        (source, target): buffer for target, turn in turns.items() for source, buffer in turn.receive_buffers.items()
    }
    for edge in sent.keys() ^ expected.keys():
        raise GossipError(
            f"rank {edge[0]} {'sends' if edge in sent else 'does not send'} rank {edge[1]} a message that it "
            f"{'does not expect' if edge in sent else 'expects'}: a codec's turns must be equal at both ends of an edge"
        )
    for (source, target), message in sent.items():
        buffer = expected[source, target]
        if (message.shape, message.dtype) != (buffer.shape, buffer.dtype) or not message.is_contiguous():
            raise GossipError(
                f"rank {source} sends rank {target} {tuple(message.shape)} of {message.dtype}, which expects "
                f"{tuple(buffer.shape)} of {buffer.dtype}: messages must be contiguous, with equal shape and dtype at "
                "both ends"
            )
        buffer.copy_(message)
    return sum(message.nbytes for message in sent.values())


def arrived(weights: Mapping[int, float], received: Messages) -> dict[int, float]:
    """Return the weights of those peers whose messages were not lost."""
    return {source: weight for source, weight in weights.items() if source in received}


def receive_buffers(kept: list[torch.Tensor], like: torch.Tensor, sources: Collection[int]) -> Messages:
    """Return a buffer like a message for each source, of those that are kept; those that are missing are made."""
    kept += [torch.empty_like(like) for _ in range(len(sources) - len(kept))]
    return dict(zip(sources, kept, strict=False))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(numel: int, device: torch.device) -> Iterator[slice]:
    """Yield the parts of a flat tensor that are processed one after the other, which are small on a CPU."""
    size = CHUNK_NUMEL if device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, size):
        yield slice(start, min(start + size, numel))


def squared_norm(values: torch.Tensor) -> float | torch.Tensor:
    """Return the squared norm, read at once only on the CPU: elsewhere reading would block until the device is done."""
    norm: torch.Tensor = torch.linalg.vector_norm(values)
    if not norm.is_cpu:
        return norm.square()
    if not math.isfinite(norm) and values.dtype == torch.float32:
        norm = torch.linalg.vector_norm(values, dtype=torch.float64)  # the squares of finite values may overflow
    return float(norm) ** 2


def finite_on_host(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors in host memory are finite; checking others would block the host."""
    return all(not tensor.is_cpu or all_finite(tensor) for tensor in tensors)


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return scratch memory. On a CPU it is the thread's own, one piece per dtype, so that it stays in the cache."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    pieces: dict[torch.dtype, torch.Tensor] = _thread.__dict__.setdefault("pieces", {})
    numel = math.prod(shape)
    if dtype not in pieces or pieces[dtype].numel() < numel:
        pieces[dtype] = torch.empty(numel, dtype=dtype)
    return pieces[dtype][:numel].view(shape)


def all_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite; if they are, usually with a single pass over memory."""
    total = float(values.sum())  # it can overflow even if all values are finite
    return total - total == 0.0 or bool(values.isfinite().all())
