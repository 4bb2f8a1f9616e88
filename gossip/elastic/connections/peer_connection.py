"""One connection to another rank, over which frames are sent and received without blocking."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch

from gossip.elastic.connections.frame_authentication import (
    NONCE_BYTES,
    TAG_BYTES,
    Authenticator,
    make_authenticators,
    tag,
)
from gossip.elastic.connections.selector import Watched

_HEADER = struct.Struct("<4sBQQQQ")
_MAGIC = b"gsp1"
_MOST_READS = 16  # from one connection before the others are served
_TCP_NOTSENT_LOWAT = 25  # linux/tcp.h; older versions of Python do not define it
# In the kernel, for a connection; messages to other members do not wait behind more than this.
_MOST_UNSENT_BYTES = 2**17
_MOST_BYTES_AT_ONCE = 2**10  # sent by the calling thread itself, which then need not wake another one
_HASHED_AT_ONCE = 2**18  # while the kernel sends what precedes it
_BEFORE_ALL = -1
_UNKNOWN = "it does not know the secret of this training"
_ALTERED = "a frame arrived that is not what was sent: on the way it was altered, repeated, left out or moved"
_NO_PAYLOAD = torch.empty(0, dtype=torch.uint8)
# No rank holds a longer message in memory. Up to here the kernel provides memory as the bytes arrive, not before.
_MOST_PAYLOAD_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Kind(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    MESSAGE = 2
    COLLECTIVE = 3
    WAITING = 4
    ALARM = 5
    GOODBYE = 6
    ASK = 7
    STATE = 8
    FLAG_VOTE = 9
    BEAT = 10
    MEMORY = 11
    READER = 12
    LENT = 13
    PAIR = 14
    AVERAGE = 15
    READY = 16
    PREEMPTED = 17
    ASKED_IN = 18


_KINDS = frozenset(Kind)


class Key(NamedTuple):
    """The subject of a frame; the meaning of the numbers depends on the kind."""

    kind: Kind
    first: int = 0
    second: int = 0
    third: int = 0


_numbers = itertools.count()


def next_number() -> int:
    """Return the number of a message of this process, counting those in both directions."""
    return next(_numbers)


class Frame(NamedTuple):
    """A frame that has arrived as a whole."""

    key: Key
    payload: torch.Tensor  # [nbytes], uint8


class Outgoing:
    """A frame that is to be sent; its payload must not be changed until :attr:`has_ended`.

    Attributes
    ----------
    key : Key
        What it is about.
    number : int
        Counts all frames of this process, and those that it expects. All messages of one exchange have the number of
        its first message.
    num_bytes : int
        The size of the whole frame, without authentication codes.
    has_begun : bool
        Whether a part of it may have been sent, so that no other frame can go before it.
    """

    def __init__(self, key: Key, payload: torch.Tensor | None = None, number: int | None = None) -> None:
        self.key = key
        self.number = next_number() if number is None else number
        nbytes = 0 if payload is None else payload.nbytes
        self._left = [memoryview(_HEADER.pack(_MAGIC, *key, nbytes))]
        self._payload = memoryview(b"")  # what has not been hashed yet
        if payload is not None and nbytes:
            self._payload = payload.detach().view(-1).view(torch.uint8).numpy().data
        self._mac: hmac.HMAC | None = None
        self.num_bytes = _HEADER.size + nbytes
        self.has_begun = self.has_ended = False
        self._lock = threading.Lock()

    def send(self, connection: socket.socket, authenticator: Authenticator | None) -> bool:
        """Send what the socket accepts, and return whether that was all."""
        with self._lock:
            if not self.has_begun:
                self.has_begun = True
                if authenticator is not None:
                    self._mac = authenticator.next(self._left[0])
                    self._left.append(memoryview(tag(self._mac)))
                self._go_on()
            while self._left:
                num_bytes = connection.sendmsg(self._left)
                while self._left and num_bytes >= len(self._left[0]):
                    num_bytes -= len(self._left.pop(0))
                if self._left:
                    self._left[0] = self._left[0][num_bytes:]
                else:
                    self._go_on()
        return True

    def _go_on(self) -> None:
        """Take up what is to be sent next of the payload, and of its code."""
        part = self._payload if self._mac is None else self._payload[:_HASHED_AT_ONCE]
        self._payload = self._payload[len(part) :]
        if part:
            self._left.append(part)
            if self._mac is not None:
                self._mac.update(part)
                if not self._payload:
                    self._left.append(memoryview(tag(self._mac)))

    def copy(self) -> None:
        """Send the rest from a copy, so that the payload may be changed."""
        with self._lock:
            self._left = [memoryview(bytes(part)) for part in self._left]
            self._payload = memoryview(bytes(self._payload))

    def end(self) -> None:
        """Release the payload, because the frame has been sent or never will be."""
        with self._lock:
            self._left, self._payload = [], memoryview(b"")
        self.has_ended = True


class Identity(NamedTuple):
    """What this end of a connection shows the other one.

    Attributes
    ----------
    secret : bytes
        What all members know; it is not sent.
    member : int
        The number of this one.
    authenticates_all : bool
        Whether all frames carry codes, and not only the greeting; the same at both ends.
    network : int
        The same where a connection does not leave the machine, so that only its administrator could alter what is sent:
        between two such ends only the greeting carries codes. 0 if this is not known.
    """

    secret: bytes
    member: int
    authenticates_all: bool = True
    network: int = 0


class ConnectionLost(Exception):
    """The connection has failed, or the peer has closed it or violated the protocol; the text says which."""

    @classmethod
    def by(cls, error: OSError) -> ConnectionLost:
        """Return what an operation on the socket has failed with."""
        return cls(error.strerror or str(error))


@contextlib.contextmanager
def reading(frame: Frame) -> Iterator[None]:
    """Within the block, the content of a frame is read: whatever is raised there is ConnectionLost by its sender."""
    try:
        yield
    except Exception as error:
        raise ConnectionLost(
            f"a frame of kind {frame.key.kind.name} that arrived cannot be read: {type(error).__name__}: {error}"
        ) from error


class PeerConnection(Watched):
    """Frames over one TCP connection. Used by one thread, except for :meth:`enqueue`.

    It begins with a greeting: each end sends a nonce and then, once it has the other's, an empty frame that carries an
    authentication code, see :mod:`gossip.elastic.connections.frame_authentication`.

    Parameters
    ----------
    timeout : timedelta
        The time without an acknowledgement after which the kernel considers the other host cut off.
    make_buffer : callable
        Returns memory for a payload of the given size.
    called : int, optional
        The member that was called.

    Attributes
    ----------
    member : int or None
        The peer, if it was called or has proved that it knows the secret.
    is_proved : bool
        Whether it has proved this.
    outgoing : deque of Outgoing
        The frames to send.
    heard_at : float
        When data last arrived.
    """

    def __init__(
        self,
        connection: socket.socket,
        timeout: timedelta,
        make_buffer: Callable[[int], torch.Tensor],
        own: Identity,
        called: int | None = None,
    ) -> None:
        super().__init__(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            patience_ms = min(int(timeout.total_seconds() * 1000), 2**31 - 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _MOST_UNSENT_BYTES)
        self.member = called
        self.is_proved = False
        self.outgoing: deque[Outgoing] = deque()
        self.heard_at = time.monotonic()
        self._sending = threading.Lock()
        self._make_buffer = make_buffer
        self._own, self._nonce = own, secrets.token_bytes(NONCE_BYTES)
        self._has_codes = True  # in every frame
        self._sends: Authenticator | None = None
        self._receives: Authenticator | None = None
        self._mac: hmac.HMAC | None = None  # of what arrives
        self._key: Key | None = None
        self._is_ready = False
        self._payload = _NO_PAYLOAD
        self._tag = bytearray(TAG_BYTES)
        self._header = bytearray(_HEADER.size)
        self._await_header()
        nonce = torch.frombuffer(bytearray(self._nonce), dtype=torch.uint8)
        self.enqueue(Outgoing(Key(Kind.HELLO, own.member, own.authenticates_all, own.network), nonce, _BEFORE_ALL))

    def _hear_greeting(self, frame: Frame) -> None:
        """Take the other end's nonce, or after that the frame that proves that it knows the secret."""
        kind, member, authenticates_all, network = frame.key
        if kind != Kind.HELLO:
            raise ConnectionLost("it began without a greeting")
        if self._receives is not None:
            self.member, self.is_proved = member, True
            return
        if self.member not in (None, member):
            raise ConnectionLost(f"rank {member} replied in its place")
        if authenticates_all != self._own.authenticates_all:
            raise ConnectionLost(
                f"authenticate must be equal on all ranks, got {bool(authenticates_all)} on rank {member}"
            )
        self._has_codes = self._own.authenticates_all and not network == self._own.network != 0
        self._sends, self._receives = make_authenticators(
            self._own.secret,
            (self._own.member, self._own.network, self._nonce),
            (member, network, frame.payload.numpy().tobytes()),
            is_caller=self.member is not None,
            authenticates_all=self._own.authenticates_all,
        )
        self.enqueue(Outgoing(Key(Kind.HELLO, self._own.member), None, _BEFORE_ALL))

    def enqueue(self, frame: Outgoing) -> bool:
        """Send a frame at once, if it is small and none precedes it; return whether it is left to :meth:`send`.

        It precedes those of later exchanges that have not begun, because these cannot be used before it.
        """
        with self._sending:
            before = sum(waiting.has_begun or waiting.number <= frame.number for waiting in self.outgoing)
            if before == 0 and frame.num_bytes <= _MOST_BYTES_AT_ONCE:
                with contextlib.suppress(OSError):  # the thread that serves the connection notices its loss
                    self._send(frame)
                    frame.end()
                    return False
            is_announced = not self.outgoing and frame.key.kind == Kind.MESSAGE and not frame.has_begun
            if is_announced and self._send_first(Key(Kind.READY)):
                before += 1
            self.outgoing.insert(before, frame)
            return True

    def _send(self, frame: Outgoing) -> None:
        self.sent_at = time.monotonic()
        frame.send(self.socket, self._sends if self._has_codes or frame.key.kind == Kind.HELLO else None)

    def beat(self, sign: Key) -> None:
        """Send a sign of life before all waiting frames, unless a frame is being sent, which is one."""
        with self._sending:
            first = self.outgoing[0] if self.outgoing else None
            if first is None or not (first.has_begun or first.key.kind == Kind.HELLO):
                self._send_first(sign)

    def _send_first(self, key: Key) -> bool:
        """Send a frame without a payload before all others; return whether it, or a part of it, waits."""
        frame = Outgoing(key)
        with contextlib.suppress(OSError):  # the thread that serves the connection notices its loss
            self._send(frame)
            return False
        self.outgoing.appendleft(frame)
        return True

    def unsent(self) -> list[tuple[int, int]]:
        """Return the number and the size of each frame that waits or is being sent."""
        with self._sending:
            return [(frame.number, frame.num_bytes) for frame in self.outgoing]

    @property
    def is_sending(self) -> bool:
        """Whether the peer is sending a frame with a payload, or has one waiting."""
        return self._is_ready or self._key is not None

    def send(self) -> bool:
        """Send what the socket accepts, and return whether everything has been sent."""
        with self._sending:
            while self.outgoing:
                frame = self.outgoing[0]
                try:
                    self._send(frame)
                except (BlockingIOError, InterruptedError):
                    return False
                except OSError as error:
                    raise ConnectionLost.by(error) from error
                self.outgoing.popleft()
                frame.end()
            return True

    def receive(self, take: Callable[[Frame], None]) -> None:
        """Read what has arrived, and pass on every complete frame, also before ConnectionLost is raised."""
        for _ in range(_MOST_READS):
            try:
                num_bytes, *_ = self.socket.recvmsg_into(self._targets)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ConnectionLost.by(error) from error
            if num_bytes == 0:
                raise ConnectionLost("the connection was closed")
            self.heard_at = time.monotonic()
            self._note_read(num_bytes)
            if not self._targets:
                self._take_in(take)

    def _await_header(self) -> None:
        self._is_authenticated = self._receives is not None and (self._has_codes or not self.is_proved)
        self._mac, self._key, self._payload, self._memory = None, None, _NO_PAYLOAD, memoryview(b"")
        self._targets = [memoryview(self._header), *[memoryview(self._tag)] * self._is_authenticated]

    def _note_read(self, num_bytes: int) -> None:
        if self._mac is not None and self._memory:
            self._mac.update(self._memory[:num_bytes])
        self._memory = self._memory[num_bytes:]
        while self._targets and num_bytes >= len(self._targets[0]):
            num_bytes -= len(self._targets.pop(0))
        if num_bytes:
            self._targets[0] = self._targets[0][num_bytes:]

    def _take_in(self, take: Callable[[Frame], None]) -> None:
        """Act upon a header or a payload that has arrived, once it is known to be what the other end sent."""
        if self._is_authenticated and self._receives is not None:
            self._mac = self._mac or self._receives.next(self._header)
            if not hmac.compare_digest(tag(self._mac), self._tag):
                raise ConnectionLost(_ALTERED if self.is_proved else _UNKNOWN)
        if self._key is None:
            magic, kind, first, second, third, nbytes = _HEADER.unpack(self._header)
            if (
                magic != _MAGIC
                or kind not in _KINDS
                or (not self.is_proved and nbytes != (0 if self._is_authenticated else NONCE_BYTES))
            ):
                raise ConnectionLost("data that arrived over the connection are not a frame of this program")
            self._key = Key(Kind(kind), first, second, third)
            if nbytes:
                self._payload = self._memory_for(nbytes)
                self._memory = self._payload.numpy().data
                self._targets = [self._memory, *[memoryview(self._tag)] * self._is_authenticated]
                return
        frame, is_nonce = Frame(self._key, self._payload), not (self.is_proved or self._is_authenticated)
        if not self.is_proved:
            self._hear_greeting(frame)
        self._await_header()
        if frame.key.kind == Kind.READY:
            self._is_ready = True
        elif not is_nonce:
            self._is_ready = self._is_ready and not frame.payload.nbytes
            take(frame)

    def _memory_for(self, nbytes: int) -> torch.Tensor:
        try:
            if nbytes <= _MOST_PAYLOAD_BYTES:
                return self._make_buffer(nbytes)
        except RuntimeError:  # of torch, which has no class of its own for it
            pass
        raise ConnectionLost(f"a frame of {nbytes} bytes was announced, for which this rank has no memory")

    def close(self) -> None:
        """Close the socket, and release the frames that were to be sent."""
        self.socket.close()
        while self.outgoing:
            self.outgoing.popleft().end()
