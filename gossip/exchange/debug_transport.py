"""The transport for finding a rank that is out of step: every message carries a description."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from gossip.communication.device_paths import Message, OnDevice, Tensors, post_point_to_point
from gossip.communication.host.worker_threads import Job
from gossip.communication.world import World
from gossip.compression.conversation import Arrival, Conversation, Turns
from gossip.errors import ExchangeError
from gossip.exchange.distributed_transport import DistributedTransport, check_device, lost_exchange, peers_in
from gossip.exchange.transport import Transport
from topologies import Round, Topology

_TAG = 0  # of all headers: between two ranks, messages of one tag arrive in the order in which they are sent
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)


class Header(NamedTuple):
    """The description of a message: six integers on the wire."""

    step: int
    bucket: int
    round_digest: int
    numel: int
    dtype: int
    digest: int

    def difference(self, source: int, found: Header) -> str | None:
        """Return in words how what rank ``source`` sent differs from what is expected; None if it does not."""
        if (found.step, found.bucket) != (self.step, self.bucket):
            return f"rank {source} sent bucket {found.bucket} of step {found.step}; one of the two ranks is out of step"
        if found.round_digest != self.round_digest:
            return f"rank {source} mixes by another round; the topologies, their seeds or their versions differ"
        if (found.numel, found.dtype) != (self.numel, self.dtype):
            return f"rank {source} sent {found.contents}, expected {self.contents}; the modules differ"
        return None

    @property
    def contents(self) -> str:
        """The number and type of the values, in words."""
        return f"{self.numel} values of {str(_DTYPES[self.dtype]).removeprefix('torch.')}"


class DebugTransport(Transport):
    """Point-to-point exchange in which every message is announced, and verified against the announcement.

    Each message is preceded by a header with step, bucket, digest of the round, number and type of the values and
    digest of the bytes. The headers between two ranks follow each other, so one matches the peer's even if the peer is
    at another step or bucket. Each rank also notes in the key-value store how far it has come, and the error of a
    time-out says so. The message itself is sent once the headers agree: nothing overlaps the next iteration, and the
    digests cost a pass over the memory. Construction is collective: every rank must construct it.
    """

    def __init__(self, world: World, topology: Topology) -> None:
        self.world = world
        self.messages = DistributedTransport(world, topology, sums_on_wire=False, shares_memory=False)
        self._round: tuple[Round, int] | None = None
        self.group = world.communicator(range(world.world_size), "debug headers")

    def describe(self) -> str:
        assert self.world.membership is not None
        return f"backend {self.world.membership.backend_name}; debug: every round point-to-point, with headers; slow"

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> DebugExchange:
        return DebugExchange(self, conversation, round_, step, bucket)

    def digest_of(self, round_: Round) -> int:
        """Return the digest of a round; that of the newest is kept."""
        if self._round is None or self._round[0] is not round_:
            self._round = round_, zlib.crc32(json.dumps(round_.to_dict(), sort_keys=True).encode())
        return self._round[1]


class DebugExchange:
    """Messages that are announced but not yet sent, see :class:`gossip.Exchange`."""

    def __init__(
        self, transport: DebugTransport, conversation: Conversation, round_: Round, step: int, bucket: int
    ) -> None:
        self._transport, self._conversation, self._round = transport, conversation, round_
        self._step, self._bucket, self._where = step, bucket, f"step {step}, bucket {bucket}"
        world, opening = transport.world, conversation.opening
        device, digest = world.control_device, transport.digest_of(round_)
        assert world.device_paths is not None
        check_device(world, opening, step, bucket)

        def header(message: torch.Tensor, checksum: int = 0) -> Header:
            return Header(step, bucket, digest, message.numel(), _DTYPES.index(message.dtype), checksum)

        sends = [
            Message(target, torch.tensor(header(message, _digest(message)), device=device), _TAG)
            for target, message in opening.sent.items()
        ]
        receives = [
            Message(source, torch.zeros(len(Header._fields), dtype=torch.int64, device=device), _TAG)
            for source in opening.receive_buffers
        ]
        self._receives = receives
        self._expected = {source: header(buffer) for source, buffer in opening.receive_buffers.items()}
        self.arrived_at: Mapping[int, float] = {}  # messages are sent only when they are awaited
        self.bytes_by_peer = {message.peer: message.tensor.nbytes for message in sends}

        def announce(sent: Tensors, received: Tensors) -> Job:
            works = post_point_to_point(transport.group, _with(receives, received), _with(sends, sent))
            world.progress_markers.note_exchange(self._where)
            yield works

        self._pending = world.device_paths.submit(
            announce, [message.tensor for message in sends], [message.tensor for message in receives]
        )

    def wait(self) -> Arrival:
        world, sources, pending = self._transport.world, tuple(self._expected), self._pending
        failure = world.wait_for(
            OnDevice(pending, world.control_device),
            self._where,
            lambda: peers_in(pending.awaited, sources, self.bytes_by_peer) or sources,
        )
        if failure is not None:
            error = lost_exchange(world, failure, self._where, pending)
            seen = world.progress_markers.last_seen(sources)
            raise ExchangeError(f"{error}; {seen}", failed_ranks=error.failed_ranks) from pending.error
        where = f"rank {world.rank}: {self._where}"
        for source, header, _ in self._receives:
            if (difference := self._expected[source].difference(source, Header(*header.tolist()))) is not None:
                raise ExchangeError(f"{where}: {difference}")
        verified = Conversation(_verified(self._conversation, self._receives, where))
        exchange = self._transport.messages.start(verified, self._round, step=self._step, bucket=self._bucket)
        arrival = exchange.wait()
        for target, num_bytes in exchange.bytes_by_peer.items():
            self.bytes_by_peer[target] = self.bytes_by_peer.get(target, 0) + num_bytes
        return arrival


def _with(messages: Sequence[Message], tensors: Tensors) -> list[Message]:
    return [message._replace(tensor=tensor) for message, tensor in zip(messages, tensors, strict=True)]


def _verified(conversation: Conversation, announced: Sequence[Message], where: str) -> Turns:
    """Yield the turns of a conversation, in which the messages of the opening are verified before they are decoded."""
    delivery = yield conversation.opening
    _, received = delivery.on_host
    for source, header, _ in announced:
        digest, at_sender = _digest(received[source]), Header(*header.tolist()).digest
        if digest != at_sender:
            raise ExchangeError(
                f"{where}: the message from rank {source} was corrupted in transit: its digest is {digest:08x}, but "
                f"was {at_sender:08x} when it was sent; check the network and both hosts' memory"
            )
    yield from conversation.proceed(delivery)
    return conversation.arrival


def _digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().data)
