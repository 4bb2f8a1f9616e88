"""The transport for finding a rank that is out of step: every message carries a description."""

from __future__ import annotations

import functools
import json
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gossip.communication.device_operations import OnDevice
from gossip.communication.device_paths import Message, Pending, Tensors, post_point_to_point
from gossip.communication.host.worker_threads import Job, Works
from gossip.communication.world import World
from gossip.compression.conversation import Arrival, Conversation, Delivery, Messages
from gossip.errors import ExchangeError
from gossip.exchange.distributed_transport import check_device, device_of, lost_exchange, peers_in
from gossip.exchange.transport import Transport
from topologies import Round, Topology

_MAGIC = 0x676F73736970  # "gossip"
_NUM_TAGS = 2**20  # far more exchanges than two ranks can be apart
_HEADERS, _MESSAGES = "debug headers", "debug messages"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)


class Header(NamedTuple):
    """The description of a message: seven integers on the wire."""

    step: int
    bucket: int
    round_digest: int
    numel: int
    dtype: int
    digest: int
    magic: int = _MAGIC

    def difference(self, source: int, found: Header) -> str | None:
        """Return in words how what rank ``source`` sent differs from what is expected; None if it does not."""
        if found.magic != _MAGIC:
            return f'rank {source} sent something other than a header; it does not use transport="debug"'
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
    digest of the bytes. The header's tag only counts the exchanges between two ranks, so it matches the peer's header
    even if the peer is at another step or bucket. Each rank also notes in the key-value store how far it has come, and
    the error of a time-out says so. The message itself is sent once the headers agree: nothing overlaps the next
    iteration, and the digests cost a pass over the memory.

    Parameters
    ----------
    world : World
        The ranks.
    topology : Topology
        The topology, of which only single rounds are used.

    Notes
    -----
    Construction is collective: every rank must construct it.
    """

    def __init__(self, world: World, topology: Topology) -> None:
        del topology
        self.world = world
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()
        self._round: tuple[Round, int] | None = None
        for purpose in (_HEADERS, _MESSAGES):
            self.world.communicator(range(world.world_size), purpose)

    def describe(self) -> str:
        assert self.world.membership is not None
        return f"backend {self.world.membership.backend_name}; debug: every round point-to-point, with headers; slow"

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> DebugExchange:
        world, opening = self.world, conversation.opening
        assert world.device_paths is not None
        check_device(world, opening, step, bucket)
        digest = self._digest_of(round_)

        def header(message: torch.Tensor, checksum: int = 0) -> Header:
            return Header(step, bucket, digest, message.numel(), _DTYPES.index(message.dtype), checksum)

        receive_tags = {source: self._next_tag(self._num_received, source) for source in opening.receive_buffers}
        send_tags = {target: self._next_tag(self._num_sent, target) for target in opening.sent}
        headers = {
            target: torch.tensor(header(message, _digest(message)), device=world.control_device)
            for target, message in opening.sent.items()
        }
        headers_received = {
            source: torch.zeros(len(Header._fields), dtype=torch.int64, device=world.control_device)
            for source in opening.receive_buffers
        }
        exchange = DebugExchange(
            conversation=conversation,
            expected={source: header(buffer) for source, buffer in opening.receive_buffers.items()},
            headers_received=headers_received,
            post=functools.partial(self._post, receive_tags, send_tags),
            step=step,
            bucket=bucket,
            world=world,
            bytes_by_peer={target: message.nbytes + headers[target].nbytes for target, message in opening.sent.items()},
        )

        def announce(sent: Tensors, received: Tensors) -> Job:
            works = exchange.post(
                _HEADERS, dict(zip(headers, sent, strict=True)), dict(zip(headers_received, received, strict=True))
            )
            world.progress_markers.note_progress(step, bucket)
            yield works

        exchange.pending = world.device_paths.submit(announce, list(headers.values()), list(headers_received.values()))
        return exchange

    def _post(
        self,
        receive_tags: Mapping[int, int],
        send_tags: Mapping[int, int],
        purpose: str,
        sent: Messages,
        received: Messages,
    ) -> Works:
        # Messages in the opposite direction of an edge have the edge's tag, too.
        tags = {**receive_tags, **send_tags}
        group = self.world.communicator(range(self.world.world_size), purpose)
        return post_point_to_point(
            group,
            [Message(source, buffer, receive_tags.get(source, tags[source])) for source, buffer in received.items()],
            [Message(target, message, send_tags.get(target, tags[target])) for target, message in sent.items()],
        )

    @staticmethod
    def _next_tag(counts: Counter[int], peer: int) -> int:
        counts[peer] += 1
        return counts[peer] % _NUM_TAGS

    def _digest_of(self, round_: Round) -> int:
        if self._round is None or self._round[0] is not round_:
            self._round = round_, zlib.crc32(json.dumps(round_.to_dict(), sort_keys=True).encode())
        return self._round[1]


@dataclass
class DebugExchange:
    """Messages that are announced but not yet sent, see :class:`gossip.Exchange`."""

    conversation: Conversation
    expected: Mapping[int, Header]
    headers_received: Messages
    post: functools.partial[Works]
    step: int
    bucket: int
    world: World
    bytes_by_peer: dict[int, int]
    pending: Pending = field(init=False)

    @property
    def arrived_at(self) -> Mapping[int, float]:
        return {}  # messages are sent only when they are awaited

    def wait(self) -> Arrival:
        self._await(self.pending, self.world.control_device)
        announced = {}
        for source, values in self.headers_received.items():
            found = Header(*values.tolist())
            if (difference := self.expected[source].difference(source, found)) is not None:
                raise ExchangeError(f"{self._where}: {difference}")
            announced[source] = found.digest

        assert self.world.device_paths is not None
        opening = self.conversation.opening
        pending = self.world.device_paths.submit(
            functools.partial(self._post_all, announced),
            list(opening.sent.values()),
            list(opening.receive_buffers.values()),
        )
        self._await(pending, device_of(opening))
        return self.conversation.arrival

    def _post_all(self, announced: Mapping[int, int], sent: Tensors, received: Tensors) -> Job:
        opening = self.conversation.opening
        wire_sent = dict(zip(opening.sent, sent, strict=True))
        wire_received = dict(zip(opening.receive_buffers, received, strict=True))
        yield self.post(_MESSAGES, wire_sent, wire_received)
        yield None
        for source, message in wire_received.items():
            digest = _digest(message)
            if digest != announced[source]:
                raise ExchangeError(
                    f"{self._where}: the message from rank {source} was corrupted in transit: its digest is "
                    f"{digest:08x}, but was {announced[source]:08x} when it was sent; check the network and both "
                    "hosts' memory"
                )
        delivery = Delivery(opening.sent, opening.receive_buffers, on_host=(wire_sent, wire_received))
        for turn in self.conversation.proceed(delivery):
            for target, message in turn.sent.items():
                self.bytes_by_peer[target] = self.bytes_by_peer.get(target, 0) + message.nbytes
            yield self.post(_MESSAGES, turn.sent, turn.receive_buffers)

    @property
    def _where(self) -> str:
        return f"rank {self.world.rank}: step {self.step}, bucket {self.bucket}"

    def _await(self, pending: Pending, device: torch.device) -> None:
        where = f"step {self.step}, bucket {self.bucket}"
        failure = self.world.wait_for(
            OnDevice(pending, device),
            where,
            lambda: peers_in(pending.awaited, self.expected, self.conversation.opening.sent) or tuple(self.expected),
        )
        if failure is not None:
            error = lost_exchange(self.world, failure, where, pending)
            if error is pending.error:
                raise error
            raise ExchangeError(f"{error}; {self._progress()}", failed_ranks=error.failed_ranks) from pending.error

    def _progress(self) -> str:
        seen = {source: self.world.progress_markers.progress(source) for source in self.expected}
        return "; ".join(
            f"rank {source} was never seen"
            if progress is None
            else f"rank {source} was last seen at bucket {progress[1]} of step {progress[0]}"
            for source, progress in seen.items()
        )


def _digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().data)
