"""Injection of faults into the process of the rank that they concern."""

import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Key, Kind, Outgoing, PeerConnection
from gossip.exchange.edge_transport import EdgeTransport
from gossip.exchange.pair_averaging import PairTransport

SENDING_PATIENCE = timedelta(seconds=20)
KINDS = ("kill", "freeze", "leave", "cut", "delay")
MESSAGES = (Kind.MESSAGE, Kind.LENT, Kind.PAIR)
#: The process may have ended by then, and another one have its number.
_THAW = (
    "import os, signal, sys, time; frozen = os.pidfd_open(int(sys.argv[2])); time.sleep(float(sys.argv[1])); "
    "signal.pidfd_send_signal(frozen, signal.SIGCONT)"
)


@dataclass(frozen=True)
class Fault:
    """One fault of one rank; see :func:`injected`.

    Attributes
    ----------
    kind : str
        One of :data:`KINDS`. "kill": SIGKILL. "freeze": SIGSTOP, and SIGCONT after ``duration_s`` unless that is None.
        "leave": SIGTERM. "cut": for ``duration_s``, nothing is sent to ``peers`` and nothing is read from them.
        "delay": for ``duration_s``, everything to be sent to ``peers`` is held back until that time has passed.
    place : str
        "sending": when the rank hands over a bucket's messages of a step, or has sent ``num_bytes`` of one.
    step, bucket : int
        The step and the bucket of the fault.
    num_bytes : int or None
        The number of bytes of the message's frame that are sent before the fault, always less than the whole frame;
        None: the fault happens before the messages are handed over.
    duration_s : float or None
        The duration of a temporary fault.
    peers : tuple of int
        The member numbers of the affected peers; empty: all of them.
    """

    kind: str = "kill"
    place: str = "sending"
    step: int = 0
    bucket: int = 0
    num_bytes: int | None = None
    duration_s: float | None = None
    peers: tuple[int, ...] = ()


@contextlib.contextmanager
def injected(faults: Iterable[Fault], may_happen: Callable[[Fault], bool] = lambda _: True) -> Iterator[None]:
    """Inject faults into this process within the block, each of them once, unless ``may_happen`` is false. Local."""
    with contextlib.ExitStack() as stack:
        for fault in faults:
            happens = functools.partial(happen, fault, may_happen)
            if fault.kind in ("cut", "delay"):
                stack.enter_context(_disturbed(fault, happens))
            elif fault.num_bytes is None:
                stack.enter_context(patched((EdgeTransport, PairTransport), "start", _sending, fault, happens))
            else:
                stack.enter_context(patched((Outgoing,), "send", _sending_a_part, fault, happens))
        yield


def happen(fault: Fault, may_happen: Callable[[Fault], bool] = lambda _: True) -> bool:
    """Let a fault happen, and return whether it did; "kill" does not return."""
    if not may_happen(fault):
        return False
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "leave":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind == "freeze":
        if fault.duration_s is not None:
            subprocess.Popen([sys.executable, "-c", _THAW, str(fault.duration_s), str(os.getpid())])
        os.kill(os.getpid(), signal.SIGSTOP)
    return True


@contextlib.contextmanager
def patched(
    targets: Iterable[Any],
    attribute: str,
    make: Callable[[Any, Fault, Callable[[], None]], Any],
    fault: Fault,
    happens: Callable[[], object],
) -> Iterator[None]:
    """Replace a method of each target within the block by ``make(method, fault, once)``; ``once`` happens once."""
    calls = iter([happens])  # of which one thread takes the only one

    def once() -> None:
        next(calls, lambda: None)()

    with contextlib.ExitStack() as patches:
        for target in targets:
            patches.enter_context(mock.patch.object(target, attribute, make(getattr(target, attribute), fault, once)))
        yield


@contextlib.contextmanager
def _disturbed(fault: Fault, happen: Callable[[], bool]) -> Iterator[None]:
    """Block or delay traffic to some members for some time, beginning with a step."""
    take_up, send = Mesh._take_up_changes, Mesh.send
    enqueue, beat = PeerConnection.enqueue, PeerConnection.beat
    began: list[float] = []
    duration_s = fault.duration_s or 0.0

    def is_on() -> bool:
        return bool(began) and time.monotonic() < began[0] + duration_s

    def concerns(member: int | None) -> bool:
        return not fault.peers or member in fault.peers

    def send_and_begin(self: Mesh, member: int, key: Any, *more: Any) -> Outgoing:
        if not began and key.kind in MESSAGES and key.first >= fault.step:
            began.append(time.monotonic() if happen() else float("-inf"))
        return send(self, member, key, *more)

    def leave_out(self: Mesh) -> None:
        take_up(self)
        if is_on():
            for connection in self._connections.values():
                if concerns(connection.member):
                    reads = selectors.EVENT_READ if fault.kind == "delay" else 0
                    self._watcher.watch(connection, connection.watched & reads)

    def queue(self: PeerConnection, frame: Outgoing) -> bool:
        if is_on() and concerns(self.member):
            self.outgoing.append(frame)
            return True
        return enqueue(self, frame)

    def stay_silent(self: PeerConnection, sign: Key) -> None:
        if not (is_on() and concerns(self.member)):
            beat(self, sign)

    with (
        mock.patch.object(Mesh, "send", send_and_begin),
        mock.patch.object(Mesh, "_take_up_changes", leave_out),
        mock.patch.object(PeerConnection, "enqueue", queue),
        mock.patch.object(PeerConnection, "beat", stay_silent),
    ):
        yield


def _sending(start: Any, fault: Fault, happen: Callable[[], None]) -> Any:
    def start_or_happen(self: Any, *args: Any, step: int, bucket: int) -> Any:
        if (step, bucket) >= (fault.step, fault.bucket):  # not ==, because a rank may have no peer in that round
            happen()
        return start(self, *args, step=step, bucket=bucket)

    return start_or_happen


class _Interrupted:
    """A socket that takes this many bytes, whereupon something happens."""

    def __init__(self, connection: socket.socket, num_bytes: int, happen: Callable[[], None]) -> None:
        self._connection, self._num_left, self._happen = connection, num_bytes, happen
        self._has_happened = False

    def sendmsg(self, parts: list[memoryview]) -> int:
        if self._has_happened:  # sending continues unless it ended the process
            return self._connection.sendmsg(parts)
        content = b"".join(parts)[: self._num_left]
        self._connection.settimeout(SENDING_PATIENCE.total_seconds())
        self._connection.sendall(content)
        self._connection.setblocking(False)
        self._num_left -= len(content)
        if self._num_left == 0:
            self._has_happened = True
            self._happen()
        return len(content)


def _sending_a_part(send: Any, fault: Fault, happen: Callable[[], None]) -> Any:
    def send_and_happen(self: Any, connection: Any, authenticator: Any) -> bool:
        is_due = self.key.kind in MESSAGES and self.key[1:3] >= (fault.step, fault.bucket)
        if is_due and not (self.has_begun or isinstance(connection, _Interrupted)):  # one at a time
            connection = _Interrupted(connection, min(fault.num_bytes or 0, self.num_bytes - 1), happen)
        sent: bool = send(self, connection, authenticator)
        return sent

    return send_and_happen
