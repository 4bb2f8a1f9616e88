"""Connections from every rank to every other one, served by one thread that never waits for a single rank."""

from __future__ import annotations

import collections
import contextlib
import hmac
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import torch

from gossip.communication import daemon_threads, forks
from gossip.communication.survivors.peer_connection import Frame, Key, Kind, Outgoing, PeerConnection, next_number
from gossip.communication.survivors.sending_turns import UnderWay, whose_turn
from gossip.errors import ExchangeError, GossipError

_MOST_BACKLOG_BYTES = 2**26
_BACKLOG = 4096
_KEPT_BUFFERS = 4  # per size
_TICK_S = 0.05
_BEAT_S = 0.5
_PROMPT_S = 0.1
_BEFORE_ALL = -1

Lost = Callable[[int, str], None]
"""Called with a member whose connection is lost, and the reason, in the thread that serves the connections."""

Handler = Callable[[int, Frame], None]
"""Called with a member's frame, in the same thread. Frames of kinds without a handler are kept until taken."""


class Mesh:
    """A connection to every other member, over which frames are sent and received; members may join and leave.

    One thread serves all connections and waits for none, so a member that is slow, frozen or dead delays no other.
    Frames on one connection keep the order of their numbers, and each is delivered as a whole or not at all: a frame
    that a member had sent in part when it died is never seen. The kernel of a member that dies closes its connections,
    which is noticed here within milliseconds.

    Parameters
    ----------
    member : int
        The number of this process among those that it is connected to.
    token : bytes
        What a connection must begin with; the same for all members, and otherwise secret.
    host : str
        The address on which to listen.
    timeout : timedelta
        How long to wait for connections.

    Attributes
    ----------
    address : tuple of (str, int)
        Where this member listens.
    lost : dict of int to str
        The members that are no longer connected, and why.
    left : set of int
        Those of them that said goodbye.
    ended : set of int
        Those of them whose hosts report that nobody listens there any more.
    changed : Condition
        Notified of every frame, of what has been sent and of losses; guards what is read here.
    beat_s : float
        The interval at which every member hears from this one, whatever it computes.
    handlers : dict of Kind to callable
        The handlers of frames that are not taken.
    on_lost, on_met, on_given_back : callable
        Called with members that are lost and connected, in the thread that serves the connections, and with memory that
        is returned, which they may handle.
    waiting : dict of int to (float, tuple of int)
        When a member last reported that it waits (``time.monotonic()``), and its position then.
    stepped_at : dict of int to float
        When a member last reported a step, for ranks that do not make their steps together.
    """

    def __init__(self, member: int, token: bytes, host: str, timeout: timedelta) -> None:
        self.member = member
        self.timeout = timeout
        self.changed = threading.Condition()
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self.ended: set[int] = set()
        self.waiting: dict[int, tuple[float, tuple[int, int, int]]] = {}
        self.stepped_at: dict[int, float] = {}
        self.on_lost: Lost = lambda _member, _reason: None
        self.on_met: Callable[[int], None] = lambda _member: None
        self.on_given_back: Callable[[torch.Tensor], bool] = lambda _payload: False
        self.handlers: dict[Kind, Handler] = {}
        self._token = token
        self._connections: dict[int, PeerConnection] = {}
        self._inbox: dict[tuple[int, Key], tuple[torch.Tensor, int]] = {}
        self._expected: dict[tuple[int, Key], tuple[int, int]] = {}  # numbers and sizes
        self._backlog: collections.Counter[int] = collections.Counter()
        self._buffers: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
        self._to_add: collections.deque[PeerConnection] = collections.deque()
        self._to_cut: collections.deque[tuple[int, str]] = collections.deque()
        self._selector = selectors.DefaultSelector()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = host, int(self._listener.getsockname()[1])
        self._wake, self._bell = socket.socketpair()
        for end in (self._wake, self._bell):
            end.setblocking(False)
        self._is_awake = False
        self.beat_s = min(_BEAT_S, timeout.total_seconds() / 10)
        self._beats_at = self._prompts_at = 0.0
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._stop = threading.Event()
        self._is_parents = False
        self._thread = daemon_threads.start(
            f"gossip-mesh-{member}", weak_run(self, Mesh._serve), end=self._stop.set, patience=timeout
        )
        forks.watch(self)

    # ------------------------------------------------------------------ connecting

    def connect(
        self, addresses: Mapping[int, tuple[str, int]], is_gone: Callable[[int], bool] = lambda _: False
    ) -> None:
        """Connect to all of these members that precede this one, and wait until the others have connected.

        Members for which ``is_gone`` returns True, because they never will connect, are lost.

        Raises
        ------
        ExchangeError
            Members could not be reached, or did not connect in time; the text names them.
        """
        self.call({member: address for member, address in addresses.items() if member < self.member})
        deadline = time.monotonic() + self.timeout.total_seconds()
        others = set(addresses) - {self.member}
        with self.changed:
            while absent := sorted(member for member in others if not self.has_met(member)):
                if not self.changed.wait(_TICK_S):
                    for member in filter(is_gone, absent):
                        self.cut(member, "its process ended before it was connected")
                if time.monotonic() > deadline:
                    break
        if absent:
            raise ExchangeError(
                f"rank {self.member}: connecting to all others: no connection with {in_words(absent)} within "
                f"{self.timeout.total_seconds():g} s"
            )

    def call(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connect to those of these members that are not connected; a member that cannot be reached is lost."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        for member, address in addresses.items():
            if not self.has_met(member):
                self._call(member, address, deadline)

    def has_met(self, member: int) -> bool:
        """Return whether a member is connected, or was."""
        with self.changed:
            return member in self._connections or member in self.lost

    def silent_s(self, member: int) -> float:
        """Return for how long nothing has arrived from a connected member."""
        with self.changed:
            connection = self._connections.get(member)
            if connection is None or self._backlog[member] > _MOST_BACKLOG_BYTES:  # what it sends is not being read
                return 0.0
            return time.monotonic() - connection.heard_at

    def _call(self, member: int, address: tuple[str, int], deadline: float) -> None:
        try:
            connected = socket.create_connection(address, max(_TICK_S, deadline - time.monotonic()))
            connection = PeerConnection(connected, self.timeout, self._buffer)
        except OSError as error:
            with self.changed:
                if isinstance(error, ConnectionRefusedError):
                    self.ended.add(member)
                self.lost[member] = f"no connection to {address[0]}:{address[1]}: {error.strerror or error}"
            self.on_lost(member, self.lost[member])
            return
        connection.member = member
        hello = torch.frombuffer(bytearray(self._token), dtype=torch.uint8)
        connection.enqueue(Outgoing(Key(Kind.HELLO, self.member), hello, _BEFORE_ALL))
        self._to_add.append(connection)
        self._ring()

    # ------------------------------------------------------------------ sending and taking

    def send(self, member: int, key: Key, payload: torch.Tensor | None = None, number: int | None = None) -> Outgoing:
        """Send a frame when its turn comes; ``payload`` must not be changed until it has ended. Does not block.

        Nothing is sent to a lost member. A frame that follows up an earlier one has the earlier one's ``number``, and
        its turn.
        """
        if self._is_parents:
            raise GossipError(forks.FORKED)
        frame = Outgoing(key, payload, number)
        with self.changed:
            connection = self._connections.get(member)
            if connection is None:
                frame.end()
            elif connection.enqueue(frame):
                self._ring()
        return frame

    def expect(self, member: int, key: Key, nbytes: int) -> None:
        """Give precedence to an expected frame over what is sent from now on, once its member is ready to send it."""
        with self.changed:
            if not self.has(member, key):
                self._expected[member, key] = next_number(), nbytes

    def has(self, member: int, key: Key) -> bool:
        """Return whether a frame is there; :attr:`changed` must be held."""
        return (member, key) in self._inbox

    def take(self, member: int, key: Key) -> torch.Tensor | None:
        """Return a frame's payload, if it is there; the caller's until :meth:`give_back`. ``changed`` must be held."""
        payload, num_bytes = self._inbox.pop((member, key), (None, 0))
        if num_bytes:
            was_paused = self._backlog[member] > _MOST_BACKLOG_BYTES
            self._backlog[member] -= num_bytes
            if was_paused and self._backlog[member] <= _MOST_BACKLOG_BYTES:
                self._ring()
        return payload

    def put(self, member: int, key: Key, payload: torch.Tensor, num_bytes: int) -> None:
        """Store a payload as if it had arrived in a frame; it occupies ``num_bytes`` of this process's memory."""
        with self.changed:
            self._inbox[member, key] = payload, num_bytes
            self._expected.pop((member, key), None)
            self._backlog[member] += num_bytes
            self.changed.notify_all()

    def give_back(self, payloads: Iterable[torch.Tensor]) -> None:
        """Return memory of payloads that are no longer needed, for reuse by others of the same size."""
        with self.changed:
            for payload in payloads:
                if self.on_given_back(payload):
                    continue
                if payload.nbytes and len(self._buffers[payload.nbytes]) < _KEPT_BUFFERS:
                    self._buffers[payload.nbytes].append(payload)

    def forget(self, is_stale: Callable[[int, Key], bool]) -> None:
        """Drop the frames that nobody will ask for."""
        with self.changed:
            for member, key in [entry for entry in self._inbox if is_stale(*entry)]:
                self.take(member, key)
            for member, key in [entry for entry in self._expected if is_stale(*entry)]:
                del self._expected[member, key]

    def cut(self, member: int, reason: str) -> None:
        """End the connection with a member, which is lost from now on. Does not block."""
        with self.changed:
            if member in self.lost:
                return
            self.lost[member] = reason
            self._to_cut.append((member, reason))
            self.changed.notify_all()
        self._ring()

    def cut_all(self, reason: str) -> None:
        """End the connections with all members. Does not block."""
        with self.changed:
            for member in list(self._connections):
                self.cut(member, reason)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        with self.changed:
            kept = self._buffers[nbytes]
            return kept.pop() if kept else torch.empty(nbytes, dtype=torch.uint8)

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> bool:
        """Serve once; return whether to continue."""
        self._take_up_changes()
        for selected, events in self._selector.select(_TICK_S):
            connection = selected.data
            if selected.fileobj is self._bell:
                self._hear()
            elif selected.fileobj is self._listener:
                self._answer()
            elif connection.socket.fileno() != -1:
                self._serve_one(connection, events)
        return not self._stop.is_set()

    def _take_up_changes(self) -> None:
        while self._to_add:
            self._know(self._to_add.popleft())
        while self._to_cut:
            member, reason = self._to_cut.popleft()
            if member in self._connections:
                self._lose(self._connections[member], reason)
        self._beat()
        sends = self._that_send()
        for member, connection in self._connections.items():
            reads = self._backlog[member] <= _MOST_BACKLOG_BYTES
            self._watch(connection, selectors.EVENT_READ * reads | selectors.EVENT_WRITE * (connection in sends))

    def _beat(self) -> None:
        """Give signs of life; more often to members for which a message waits for its turn."""
        now = time.monotonic()
        to_all = now >= self._beats_at
        if to_all or now >= self._prompts_at:
            self._prompts_at = now + _PROMPT_S
            self._beats_at = now + self.beat_s if to_all else self._beats_at
            with self.changed:
                for connection in self._connections.values():
                    if to_all or connection.outgoing:
                        connection.beat()

    def _that_send(self) -> list[PeerConnection]:
        """Return the connections whose turn it is."""
        now = time.monotonic()
        messages: list[UnderWay] = []
        with self.changed:
            for member, connection in self._connections.items():
                quiet_s = now - connection.sent_at if connection.watched & selectors.EVENT_WRITE else 0.0
                messages += [UnderWay(n, member, nbytes, True, quiet_s) for n, nbytes in connection.unsent()]
            for (member, _), (number, nbytes) in self._expected.items():
                sender = self._connections.get(member)
                if sender is not None and sender.is_sending:
                    messages.append(UnderWay(number, member, nbytes, False, now - sender.heard_at))
            return [self._connections[member] for member in whose_turn(messages)]

    def _watch(self, connection: PeerConnection, events: int) -> None:
        """Register for exactly these events."""
        if events == connection.watched:
            return
        if events & ~connection.watched & selectors.EVENT_WRITE:
            connection.sent_at = time.monotonic()  # the connection could not have accepted anything before
        if not connection.watched:
            self._selector.register(connection.socket, events, connection)
        elif events:
            self._selector.modify(connection.socket, events, connection)
        else:
            self._selector.unregister(connection.socket)
        connection.watched = events

    def _serve_one(self, connection: PeerConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                num_waiting = len(connection.outgoing)
                connection.send()
                if len(connection.outgoing) != num_waiting:
                    with self.changed:
                        self.changed.notify_all()
            if events & selectors.EVENT_READ:
                connection.receive(lambda frame: self._sort_in(connection, frame))
        except (OSError, ValueError) as error:
            self._lose(connection, getattr(error, "strerror", None) or str(error))

    def _sort_in(self, connection: PeerConnection, frame: Frame) -> None:
        kind, member = frame.key.kind, connection.member
        if member is None:
            if kind != Kind.HELLO or not hmac.compare_digest(frame.payload.numpy().tobytes(), self._token):
                raise ConnectionError("an unknown process connected")
            connection.member = frame.key.first
            self._know(connection)
        elif kind in self.handlers:
            self.handlers[kind](member, frame)
        elif kind == Kind.GOODBYE:
            with self.changed:
                self.left.add(member)
                self.changed.notify_all()
        elif kind == Kind.WAITING:
            num_loaded, step, num_ended = frame.payload.view(torch.int64).tolist()
            self.waiting[member] = time.monotonic(), (num_loaded, step, num_ended)
        elif kind == Kind.STEPPED:
            self.stepped_at[member] = time.monotonic()
        elif kind != Kind.BEAT:  # its arrival is all that counts
            self.put(member, frame.key, frame.payload, frame.payload.nbytes)

    def _know(self, connection: PeerConnection) -> None:
        assert connection.member is not None
        with self.changed:
            if connection.member in self.lost or connection.member in self._connections:
                raise ConnectionError("it is lost or already connected")
            self._connections[connection.member] = connection
            self.changed.notify_all()
        self.on_met(connection.member)

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                self._watch(PeerConnection(accepted, self.timeout, self._buffer), selectors.EVENT_READ)

    def _lose(self, connection: PeerConnection, reason: str) -> None:
        self._watch(connection, 0)
        member = connection.member
        with self.changed:
            connection.close()
            if member is None or self._connections.get(member) is not connection:
                return
            del self._connections[member]
            self.lost.setdefault(member, reason)
            self.changed.notify_all()
        self.on_lost(member, self.lost[member])

    def _ring(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(OSError):
                self._wake.send(b"\0")

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.recv(4096)
        self._is_awake = False

    # ------------------------------------------------------------------ closing

    def leave(self, patience: timedelta) -> None:
        """Say goodbye, send what remains for as long as somebody receives it, and close. Local."""
        if self._is_parents:
            return
        with self.changed:
            goodbyes = [self.send(member, Key(Kind.GOODBYE)) for member in list(self._connections)]
            self.changed.wait_for(
                lambda: all(frame.has_ended for frame in goodbyes), min(patience, self.timeout).total_seconds()
            )
        self.close()

    def close(self) -> None:
        """End the thread and all connections. Local."""
        if self._is_parents:
            return
        self._stop.set()
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(daemon_threads.CLOSING_PATIENCE.total_seconds())
        if not self._thread.is_alive():
            for connection in list(self._connections.values()):
                connection.close()
            self._connections.clear()
            for end in (self._selector, self._listener, self._wake, self._bell):
                end.close()

    def leave_to_parent(self) -> None:
        """Implement :class:`gossip.communication.forks.Inherited`."""
        self._is_parents = True
        self.changed = threading.Condition()  # another thread may have held the old one
        forks.keep(self)


def weak_run(owner: object, turn: Callable[..., bool]) -> Callable[[], None]:
    """Return the function of a thread that takes turns for as long as its owner lives and has more of them."""
    reference = weakref.ref(owner)

    def run() -> None:
        while (alive := reference()) is not None and turn(alive):
            del alive

    return run


def in_words(members: Sequence[int]) -> str:
    """ "rank 3", or "ranks 3, 5"."""
    return f"rank{'s' * (len(members) != 1)} {', '.join(map(str, members))}"
