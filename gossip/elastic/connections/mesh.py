"""Connections from every rank to every other one, served by one thread that never waits for a single rank."""

import collections
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch

from gossip.communication.host import daemon_threads, forks
from gossip.elastic.connections.listener import Listener
from gossip.elastic.connections.peer_connection import (
    ConnectionLost,
    Frame,
    Identity,
    Key,
    Kind,
    Outgoing,
    PeerConnection,
    next_number,
)
from gossip.elastic.connections.selector import READ, WRITE, Watcher
from gossip.elastic.connections.send_queue import UnderWay, whose_turn
from gossip.errors import ExchangeError, GossipError

_MOST_BACKLOG_BYTES = 2**26
_KEPT_BUFFERS = 4  # per size
_TICK_S = 0.05
_BEAT_S = 0.5
_PROMPT_S = 0.1
_NUM_BEATS_MISSED = 4

Handler = Callable[[int, Frame], None]
"""Called with a member's frame, in the thread that serves them. Frames of kinds without a handler are kept until taken.

``ConnectionLost`` ends the connection with that member (see ``peer_connection.reading``); any other exception is this
rank's own, and ends its part in the training.
"""


class Mesh:
    """A connection to every other member, over which frames are sent and received; members may join and leave.

    One thread serves all connections and waits for none, so a member that is slow, frozen or dead delays no other.
    Frames on one connection keep the order of their numbers, and each is delivered as a whole or not at all: a frame
    that a member had sent in part when it died is never seen. The kernel of a member that dies closes its connections,
    which is noticed here within milliseconds.

    Parameters
    ----------
    own : Identity
        This member, as it shows itself to the others.
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
    farewells : dict of int to tuple of int
        The positions of all members that ever said goodbye, at the time: everything that they sent has arrived.
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
    step : int
        This member's step, which its signs of life report.
    stepped : dict of int to (int, float)
        The step that a member last reported, and when it first did.
    failure : GossipError or None
        A thread that serves the other members has failed, and this one cannot continue; the cause is its exception.
    on_failed : callable
        Called with it, in that thread.
    position : callable
        Returns this member's position, which the others hear of while it waits.
    """

    def __init__(self, own: Identity, host: str, timeout: timedelta) -> None:
        self._own, self.member = own, own.member
        self.timeout, self.step = timeout, 0
        self.changed = threading.Condition()
        self.lost: dict[int, str] = {}
        self.left: set[int] = set()
        self.farewells: dict[int, tuple[int, int, int]] = {}
        self.ended: set[int] = set()
        self._waiting: dict[int, tuple[float, tuple[int, int, int]]] = {}  # who said that it waits when, and where
        self.stepped: dict[int, tuple[int, float]] = {}
        self.on_lost: Callable[[int, str], None] = lambda _member, _reason: None
        self.on_met: Callable[[int], None] = lambda _member: None
        self.on_given_back: Callable[[torch.Tensor], bool] = lambda _payload: False
        self.on_failed: Callable[[GossipError], None] = lambda _error: None
        self.position: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
        self._waits: set[object] = set()
        self.failure: GossipError | None = None
        self.handlers: dict[Kind, Handler] = {}
        self._calling: dict[int, PeerConnection] = {}  # those called that have not replied yet
        self._connections: dict[int, PeerConnection] = {}
        self._inbox: dict[tuple[int, Key], tuple[torch.Tensor, int]] = {}
        self._expected: dict[tuple[int, Key], tuple[int, int]] = {}  # numbers and sizes
        self._backlog: collections.Counter[int] = collections.Counter()
        self._buffers: dict[int, list[torch.Tensor]] = collections.defaultdict(list)
        self._to_cut: collections.deque[tuple[int, str]] = collections.deque()
        self._watcher = Watcher()
        self._listener = Listener(own.member, host, self._connection)
        self.address = host, int(self._listener.socket.getsockname()[1])
        self.beat_s, self._long_s = min(_BEAT_S, timeout.total_seconds() / 10), timeout.total_seconds() / 2
        self._beats_at = self._prompts_at = 0.0
        self.looked_at = self._heard_at = time.monotonic()  # for what has arrived; anybody
        self.thawed = collections.defaultdict[int, float](lambda: float("-inf"))  # when who came back from a pause
        self.woke_at = float("-inf")  # after having heard nobody
        self._stop, self._is_parents = threading.Event(), False
        self._thread = daemon_threads.start(
            f"gossip-mesh-{own.member}",
            daemon_threads.weak_run(self, Mesh._serve),
            end=self._stop.set,
            failed=daemon_threads.weak_call(self, Mesh._fail_here),
            patience=timeout,
        )
        forks.watch(self)

    # ------------------------------------------------------------------ connecting

    def connect(
        self, addresses: Mapping[int, tuple[str, int]], is_gone: Callable[[int], bool] = lambda _: False
    ) -> None:
        """Connect to all of these members that precede this one, and wait until the others have connected.

        Members for which ``is_gone`` returns True, because they never will connect, are lost.
        """
        self.call({member: address for member, address in addresses.items() if member < self.member})
        now = time.monotonic()
        deadline, looks_at = now + self.timeout.total_seconds(), now + _TICK_S
        with self.changed, self.waits():
            while absent := sorted(m for m in {*addresses} - {self.member} if not self.has_met(m)):
                self.check()
                self.changed.wait(_TICK_S)
                now = time.monotonic()
                if now >= looks_at:
                    looks_at = now + _TICK_S
                    for member in filter(is_gone, absent):
                        self.cut(member, "its process ended before it was connected")
                if now > deadline:
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
            if not (self.has_met(member) or member in self._calling):
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
            return max(0.0, self.looked_at - connection.heard_at)  # as if this process had stood still since then

    def _call(self, member: int, address: tuple[str, int], deadline: float) -> None:
        try:
            connected = socket.create_connection(address, max(_TICK_S, deadline - time.monotonic()))
            connection = self._connection(connected, member)
        except OSError as error:
            with self.changed:
                if isinstance(error, ConnectionRefusedError):
                    self.ended.add(member)
                self.lost[member] = f"no connection to {address[0]}:{address[1]}: {error.strerror or error}"
            self.on_lost(member, self.lost[member])
            return
        with self.changed:
            self._calling[member] = connection
        self._watcher.ring()

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
                self._watcher.ring()
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
            self._backlog[member] -= num_bytes
            if self._backlog[member] <= _MOST_BACKLOG_BYTES < self._backlog[member] + num_bytes:
                self._watcher.ring()
        return payload

    def is_of_size(self, member: int, key: Key, payload: torch.Tensor, nbytes: int) -> bool:
        """Return whether a frame's payload has the size that it must have; otherwise its member is lost."""
        if payload.nbytes != nbytes:
            self.cut(member, f"its frame {tuple(key)} has {payload.nbytes} bytes, and must have {nbytes}")
        return payload.nbytes == nbytes

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
                kept = self._buffers[payload.nbytes]
                if not self.on_given_back(payload) and payload.nbytes and len(kept) < _KEPT_BUFFERS:
                    kept.append(payload)

    def forget(self, is_stale: Callable[[int, Key], bool]) -> None:
        """Drop the frames that nobody will ask for."""
        with self.changed:
            taken = [self.take(*entry) for entry in list(self._inbox) if is_stale(*entry)]
            self.give_back(payload for payload in taken if payload is not None)
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
        self._watcher.ring()

    def cut_all(self, reason: str) -> None:
        """End the connections with all members. Does not block."""
        with self.changed:
            for member in list(self._connections):
                self.cut(member, reason)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        with self.changed:
            kept = self._buffers.get(nbytes)
            return kept.pop() if kept else torch.empty(nbytes, dtype=torch.uint8)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Within the block, tell every member that this one waits for others, so that none drops it because of them."""
        one = object()
        self._waits.add(one)  # without a lock, as callers hold others
        try:
            yield
        finally:
            self._waits.remove(one)

    def waits_at(self, member: int) -> tuple[int, int, int] | None:
        """Return the position at which a member waits for others, as it says with its signs of life; None if not."""
        told_at, position = self._waiting.get(member, (0.0, (0, 0, 0)))
        return None if told_at < time.monotonic() - _NUM_BEATS_MISSED * self.beat_s else position

    def check(self) -> None:
        """Raise :attr:`failure`, if there is one."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: Exception) -> None:
        """Let this member's current wait for others, or the next one, raise what ended a thread. Does not block."""
        failure = GossipError(f"rank {self.member}: a thread that replies to other ranks has failed: {error!r}")
        failure.__cause__ = error
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()
        self.on_failed(failure)

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> bool:
        """Serve once; return whether to continue."""
        self._take_up_changes()
        found, now = self._watcher.wait(_TICK_S), time.monotonic()
        if now - self.looked_at > self._long_s:
            self.thawed[self.member] = now
        for connection, events in found:
            if not isinstance(connection, PeerConnection):
                self._listener.accept(time.monotonic())
            elif connection.socket.fileno() != -1:
                self._serve_one(connection, events)
        self.looked_at = time.monotonic()
        heard_at = max((each.heard_at for each in self._connections.values()), default=self.looked_at)
        if heard_at - self._heard_at > _NUM_BEATS_MISSED * self.beat_s:
            self.woke_at = heard_at
        self._heard_at = max(self._heard_at, heard_at)
        return not self._stop.is_set()

    def _fail_here(self, error: Exception) -> None:
        """End the connections when the thread that serves them has failed, so that the others notice at once."""
        self._listener.close()
        for connection in [*self._connections.values(), *self._calling.values()]:
            connection.close()
        self.fail(error)

    def _take_up_changes(self) -> None:
        now = time.monotonic()
        for connection in self._listener.overdue(now):
            self._lose(connection, "it did not say in time which rank it is")
        self._watcher.watch(self._listener, READ * self._listener.is_open(now))
        with self.changed:
            unknown = [*self._listener.unknown, *self._calling.values()]
        for connection in unknown:
            self._watcher.watch(connection, READ | WRITE * bool(connection.outgoing))
        while self._to_cut:
            member, reason = self._to_cut.popleft()
            if member in self._connections:
                self._lose(self._connections[member], reason)
        self._beat()
        sends = self._that_send()
        for member, connection in self._connections.items():
            reads = self._backlog[member] <= _MOST_BACKLOG_BYTES
            self._watcher.watch(connection, READ * reads | WRITE * (connection in sends))

    def _beat(self) -> None:
        """Give signs of life; more often to members for which a message waits for its turn."""
        now = time.monotonic()
        to_all = now >= self._beats_at
        if to_all or now >= self._prompts_at:
            self._prompts_at = now + _PROMPT_S
            self._beats_at = now + self.beat_s if to_all else self._beats_at
            with self.changed:
                sign = Key(Kind.WAITING, *self.position()) if self._waits else Key(Kind.BEAT, self.step)
                for connection in self._connections.values():
                    if to_all or connection.outgoing:
                        connection.beat(sign)

    def _that_send(self) -> list[PeerConnection]:
        """Return the connections whose turn it is."""
        now = time.monotonic()
        messages: list[UnderWay] = []
        with self.changed:
            for member, connection in self._connections.items():
                if not connection.outgoing:
                    continue
                quiet_s = now - connection.sent_at if connection.watched & WRITE else 0.0
                messages += [UnderWay(n, member, nbytes, True, quiet_s) for n, nbytes in connection.unsent()]
            for (member, _), (number, nbytes) in self._expected.items():
                sender = self._connections.get(member)
                if sender is not None and sender.is_sending:
                    messages.append(UnderWay(number, member, nbytes, False, now - sender.heard_at))
            return [self._connections[member] for member in whose_turn(messages)]

    def _serve_one(self, connection: PeerConnection, events: int) -> None:
        try:
            if events & WRITE:
                num_waiting = len(connection.outgoing)
                connection.send()
                if len(connection.outgoing) != num_waiting:
                    with self.changed:
                        self.changed.notify_all()
            if events & READ:
                heard_at = connection.heard_at
                connection.receive(lambda frame: self._sort_in(connection, frame))
                if connection.heard_at - heard_at > self._long_s and connection.member is not None:
                    self.thawed[connection.member] = connection.heard_at
        except ConnectionLost as error:  # any other exception is this rank's own
            self._lose(connection, str(error))

    def _sort_in(self, connection: PeerConnection, frame: Frame) -> None:
        kind, member = frame.key.kind, connection.member
        assert member is not None  # it has proved to be a member
        if kind == Kind.HELLO:
            self._know(member, connection)
        elif kind in self.handlers:
            self.handlers[kind](member, frame)
        elif kind == Kind.GOODBYE:
            with self.changed:
                if member not in self.lost:  # a rank that agrees without it has said what it knows of it
                    self.left.add(member)
                    self.farewells[member] = frame.key[1:]
                    self.changed.notify_all()
        elif kind == Kind.WAITING:
            self._waiting[member] = time.monotonic(), frame.key[1:]
        elif kind == Kind.BEAT:
            if member not in self.stepped or self.stepped[member][0] != frame.key.first:
                self.stepped[member] = frame.key.first, time.monotonic()
        else:
            self.put(member, frame.key, frame.payload, frame.payload.nbytes)

    def _know(self, member: int, connection: PeerConnection) -> None:
        with self.changed:
            if self.has_met(member):
                raise ConnectionLost("it is lost or already connected")
            self._connections[member] = connection
            if self._calling.get(member) is connection:
                del self._calling[member]
            self.changed.notify_all()
        self._listener.forget(connection)
        self.on_met(member)

    def _connection(self, connected: socket.socket, called: int | None = None) -> PeerConnection:
        return PeerConnection(connected, self.timeout, self._buffer, self._own, called)

    def _lose(self, connection: PeerConnection, reason: str) -> None:
        self._watcher.watch(connection, 0)
        self._listener.forget(connection)
        member = connection.member
        with self.changed:
            connection.close()
            if member is None:
                return
            held = [kept for kept in (self._connections, self._calling) if kept.get(member) is connection]
            for kept in held:
                del kept[member]
            if not held or member in self._connections:
                return
            self.lost.setdefault(member, reason)
            self.changed.notify_all()
        self.on_lost(member, self.lost[member])

    # ------------------------------------------------------------------ closing

    def leave(self, patience: timedelta) -> None:
        """Say goodbye, send what remains for as long as somebody receives it, and close. Local."""
        if self._is_parents:
            return
        with self.changed:
            goodbye = Key(Kind.GOODBYE, *self.position())
            goodbyes = [self.send(member, goodbye) for member in list(self._connections)]
            self.changed.wait_for(
                lambda: all(frame.has_ended for frame in goodbyes), min(patience, self.timeout).total_seconds()
            )
        self.close()

    def close(self) -> None:
        """End the thread and all connections. Local."""
        if self._is_parents:
            return
        self._stop.set()
        self._watcher.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(daemon_threads.CLOSING_PATIENCE.total_seconds())
        if not self._thread.is_alive():
            for connection in [*self._connections.values(), *self._calling.values()]:
                connection.close()
            self._connections.clear()
            self._listener.close()
            self._watcher.close()

    def leave_to_parent(self) -> None:
        """Implement :class:`gossip.communication.host.forks.Inherited`."""
        self._is_parents = True
        self.changed = threading.Condition()  # another thread may have held the old one
        forks.keep(self)


def in_words(members: Sequence[int]) -> str:
    """ "rank 3", or "ranks 3, 5"."""
    return f"rank{'s' * (len(members) != 1)} {', '.join(map(str, members))}"
