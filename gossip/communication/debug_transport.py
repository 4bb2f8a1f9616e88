"""The transport for finding a rank that is out of step: every message says what it is."""

from __future__ import annotations

import functools
import json
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from gossip.communication.courier import Works
from gossip.communication.lanes import Message, Pending, Tensors, post_point_to_point
from gossip.communication.transports import Transport, check_device, weighted_sum
from gossip.communication.world import World, device_is_idle
from gossip.errors import ExchangeError
from topologies import Round

_MAGIC = 0x676F73736970  # "gossip"
_NUM_TAGS = 2**20  # far more exchanges than two ranks can be apart
_HEADERS, _MESSAGES = "debug headers", "debug messages"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GLANCE = timedelta(seconds=0.1)
_LATENESS = timedelta(seconds=1)  # of a header whose sender says that it is gone


def check_debug(debug: str | None, transport: Transport | None) -> None:
    """Refuse what GossipDataParallel's ``debug`` cannot be.

    Raises
    ------
    ValueError
        It is neither None nor "detail", or a transport was given too.
    """
    if debug not in (None, "detail"):
        raise ValueError(f'debug must be None or "detail", got {debug!r}')
    if debug is not None and transport is not None:
        raise ValueError(f"debug={debug!r} brings its own transport; leave out transport={type(transport).__name__}")


@dataclass(frozen=True)
class Header:
    """What a message is: seven integers on the wire."""

    step: int
    bucket: int
    round_digest: int
    numel: int
    dtype: int
    digest: int

    LENGTH = 7

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        """[LENGTH], int64."""
        values = [_MAGIC, self.step, self.bucket, self.round_digest, self.numel, self.dtype, self.digest]
        return torch.tensor(values, dtype=torch.int64, device=device)

    def difference(self, source: int, values: Sequence[int]) -> str | None:
        """In words how what rank ``source`` sent differs from what this rank has; None if it does not."""
        if values[0] != _MAGIC:
            return f'rank {source} sent something else than a header: it is not in debug="detail"'
        theirs = Header(*values[1:])
        if (theirs.step, theirs.bucket) != (self.step, self.bucket):
            return f"rank {source} sent bucket {theirs.bucket} of step {theirs.step}: one of the two is out of step"
        if theirs.round_digest != self.round_digest:
            return f"rank {source} mixes by another round: the topologies, their seeds or their versions differ"
        if (theirs.numel, theirs.dtype) != (self.numel, self.dtype):
            return f"rank {source} sent {theirs.contents}, expected {self.contents}: the modules differ"
        return None

    @property
    def contents(self) -> str:
        """For people: number and type of the values."""
        return f"{self.numel} values of {str(_DTYPES[self.dtype]).removeprefix('torch.')}"


class DebugTransport:
    """Point-to-point exchange in which every message is announced, and checked against the announcement.

    A header with step, bucket, digest of the round, number and type of the values and digest of the bytes goes ahead of
    each message. Its tag counts the exchanges between two ranks and nothing else, so that it meets the peer's header
    also if the peer is at another step or bucket; each rank also notes in the key-value store how far it has come, so
    that a rank is found that went on without its peer. The message itself travels once the headers agree: nothing is
    hidden behind the next iteration, and the digests cost a pass over the memory.

    Parameters
    ----------
    world : World

    Notes
    -----
    Collective: every rank must construct it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._num_sent: Counter[int] = Counter()
        self._num_received: Counter[int] = Counter()
        self._round: tuple[Round, int] | None = None
        for purpose in (_HEADERS, _MESSAGES):
            self.world.communicator(range(world.world_size), purpose)

    def describe(self) -> str:
        """One line for the log. Local."""
        assert self.world.membership is not None
        return f"backend {self.world.membership.backend_name}; debug: every round point-to-point, with headers; slow"

    def start(self, message: torch.Tensor, round_: Round, *, step: int, bucket: int) -> DebugExchange:
        world = self.world
        assert world.lanes is not None
        check_device(world, message, step, bucket)
        header = Header(
            step, bucket, self._digest_of(round_), message.numel(), _DTYPES.index(message.dtype), _digest(message)
        )
        sources, targets = round_.neighbours(world.rank), round_.targets(world.rank)
        receive_tags = {source: self._next_tag(self._num_received, source) for source in sources}
        send_tags = {target: self._next_tag(self._num_sent, target) for target in targets}
        exchange = functools.partial(self._exchange, receive_tags, send_tags)
        rows = torch.zeros((len(sources), Header.LENGTH), dtype=torch.int64, device=world.control_device)

        def announce(sent: Tensors, received: Tensors) -> Works:
            works = exchange(_HEADERS, sent, received)
            world.roll_call.note_progress(step, bucket)
            return works

        return DebugExchange(
            pending=world.lanes.submit(announce, [header.to_tensor(world.control_device)], list(rows)),
            exchange=exchange,
            header=header,
            theirs=rows,
            message=message,
            weights=sources,
            self_weight=round_.self_weight(world.rank),
            world=world,
            bytes_by_peer=dict.fromkeys(targets, message.nbytes + Header.LENGTH * rows.itemsize),
        )

    def _exchange(
        self, receive_tags: dict[int, int], send_tags: dict[int, int], purpose: str, sent: Tensors, received: Tensors
    ) -> Works:
        group = self.world.communicator(range(self.world.world_size), purpose)
        receives = zip(receive_tags.items(), received, strict=True)
        return post_point_to_point(
            group,
            [Message(source, row, tag) for (source, tag), row in receives],
            [Message(target, sent[0], tag) for target, tag in send_tags.items()],
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
    """A message under way, announced but not yet sent; see :class:`gossip.Exchange`."""

    pending: Pending
    exchange: functools.partial[Works]
    header: Header
    theirs: torch.Tensor
    message: torch.Tensor
    weights: dict[int, float]
    self_weight: float
    world: World
    bytes_by_peer: Mapping[int, int]

    @property
    def arrived_at(self) -> Mapping[int, float]:
        return {}  # messages leave only when they are awaited

    def wait(self) -> torch.Tensor:
        self._await(self.pending, self.theirs.device)
        for source, values in zip(self.weights, self.theirs.tolist(), strict=True):
            difference = self.header.difference(source, values)
            if difference is not None:
                raise ExchangeError(f"{self._where}: {difference}")

        assert self.world.lanes is not None
        received = self.message.new_empty((len(self.weights), self.message.numel()))
        post = functools.partial(self.exchange, _MESSAGES)
        self._await(self.world.lanes.submit(post, [self.message], list(received)), self.message.device)
        for source, row, values in zip(self.weights, received, self.theirs.tolist(), strict=True):
            digest, announced = _digest(row), Header(*values[1:]).digest
            if digest != announced:
                raise ExchangeError(
                    f"{self._where}: the message of rank {source} was corrupted on the way: its digest is "
                    f"{digest:08x}, and was {announced:08x} when it left; check the network and both hosts' memory"
                )
        return weighted_sum(self.message, received, tuple(self.weights.values()), self.self_weight)

    @property
    def _where(self) -> str:
        return f"rank {self.world.rank}: step {self.header.step}, bucket {self.header.bucket}"

    def _await(self, pending: Pending, device: torch.device) -> None:
        timeout_s = self.world.timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        overtaken_since: float | None = None
        while not (pending.wait(_GLANCE) and device_is_idle(device, time.monotonic() + _GLANCE.total_seconds())):
            now = time.monotonic()
            if now > deadline:
                raise ExchangeError(
                    f"{self._where}: waited {timeout_s:g} s in vain for {pending.awaited}; {self._progress()} "
                    "(GossipDataParallel's timeout sets how long to wait)"
                )
            ahead = self._who_is_ahead() if pending is self.pending else ""
            if not ahead:
                overtaken_since = None
            elif overtaken_since is None:
                overtaken_since = now
            elif now - overtaken_since > _LATENESS.total_seconds():
                raise ExchangeError(f"{self._where}: {ahead} without a message for it: one of the two is out of step")
        if pending.error is not None:
            raise ExchangeError(
                f"{self._where}: failed while waiting for {pending.awaited}: {pending.error}; {self._progress()}"
            ) from pending.error

    def _who_is_ahead(self) -> str:
        for source in self.weights:
            progress = self.world.roll_call.progress(source)
            if progress is not None and progress > (self.header.step, self.header.bucket):
                return f"rank {source} has gone on to bucket {progress[1]} of step {progress[0]}"
        return ""

    def _progress(self) -> str:
        seen = {source: self.world.roll_call.progress(source) for source in self.weights}
        return "; ".join(
            f"rank {source} was never seen"
            if progress is None
            else f"rank {source} was last seen at bucket {progress[1]} of step {progress[0]}"
            for source, progress in seen.items()
        )


def _digest(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().data)
