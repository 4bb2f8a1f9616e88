"""Sockets between simulated processes, and a key-value store: links have a delay, are cut in one direction or both."""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elastic_simulator.virtual_time import Process, Scheduler, Thread
from gossip.elastic.connections.selector import READ, WRITE, Watched

_CAPACITIES = (100, 1000, 100_000)  # in bytes that are on their way in one direction of a connection
_PORTS = 20_000
_STORE_TIMEOUT_S = 10.0


class Link:
    """One direction between two processes."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.is_cut = False


class Pipe:
    """One direction of a connection: bytes that are on their way, then bytes that have arrived."""

    def __init__(self, network: Network, link: Link, capacity: int) -> None:
        self._network, self._link, self.capacity = network, link, capacity
        self.under_way: deque[tuple[float, bytes]] = deque()  # empty bytes are the end
        self.num_under_way = 0
        self.arrived = bytearray()
        self.has_ended = False
        self.reader: Any = None
        self.writer: Any = None

    @property
    def room(self) -> int:
        return self.capacity - self.num_under_way - len(self.arrived)

    def put(self, data: bytes) -> None:
        scheduler = self._network.scheduler
        due = scheduler.now + self._link.delay * (0.5 + scheduler.random.random())
        if self.under_way:
            due = max(due, self.under_way[-1][0])
        self.under_way.append((due, data))
        self.num_under_way += len(data)
        scheduler.at(due, self.deliver)

    def deliver(self) -> None:
        """Let arrive what is due, unless the link is cut."""
        if self._link.is_cut:
            self._network.may_time_out(self)
            return
        now, has_changed = self._network.scheduler.now, False
        while self.under_way and self.under_way[0][0] <= now:
            data = self.under_way.popleft()[1]
            self.num_under_way -= len(data)
            self.arrived += data
            self.has_ended |= not data
            has_changed = True
        if has_changed:
            self.reader.changed()


class Socket:
    """One end of a connection between two processes."""

    def __init__(self, process: Process, other: Process, incoming: Pipe, outgoing: Pipe, network: Network) -> None:
        self.process, self.other = process, other
        self._incoming, self._outgoing, self._network = incoming, outgoing, network
        self.error: int | None = None
        self.is_closed = False
        self.watcher: VirtualWatcher | None = None
        self.watched: Any = None
        incoming.reader, outgoing.writer = self, self

    def changed(self) -> None:
        """Wake who waits for it."""
        if self.watcher is not None:
            self.watcher.note(self.watched)

    @property
    def events(self) -> int:
        """What would not block."""
        if self.error is not None:
            return READ | WRITE
        reads = bool(self._incoming.arrived) or self._incoming.has_ended
        return READ * reads | WRITE * (self._outgoing.room > 0)

    def fail(self, number: int) -> None:
        """Let what is done with it from now on fail."""
        if not self.is_closed:
            self.error = self.error or number
            self.changed()

    def _check(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        self._check()
        room = self._outgoing.room
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "it would block")
        data = b"".join(buffers)[:room]
        if len(data) > 1 and self._network.scheduler.random.random() < 0.02:
            data = data[: len(data) // 2]
        self._outgoing.put(data)
        return len(data)

    def recvmsg_into(self, targets: Sequence[Any]) -> tuple[int, list[Any], int, None]:
        if self.is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        arrived, num_bytes = self._incoming.arrived, 0
        if not arrived:
            self._check()
            if not self._incoming.has_ended:
                raise BlockingIOError(errno.EAGAIN, "it would block")
        for target in targets:
            part = arrived[num_bytes : num_bytes + len(target)]
            target[: len(part)] = part
            num_bytes += len(part)
        del arrived[:num_bytes]
        if num_bytes and self._outgoing is not None:
            self._network.writable(self._incoming)
        return num_bytes, [], 0, None

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._network.closed(self)

    def end(self) -> None:
        """Let the other end read to the end, and find it."""
        self._outgoing.put(b"")

    def fileno(self) -> int:
        return -1 if self.is_closed else 1

    def setsockopt(self, *_: object) -> None:
        """Options change nothing here."""

    def setblocking(self, _: bool) -> None:
        """Nothing here blocks."""


class ListeningSocket:
    """A socket at which other processes connect."""

    def __init__(self, network: Network, process: Process, port: int) -> None:
        self.process, self._network, self._port = process, network, port
        self.waiting: deque[Socket] = deque()
        self.is_closed = False
        self.watcher: VirtualWatcher | None = None
        self.watched: Any = None

    @property
    def events(self) -> int:
        return READ * bool(self.waiting)

    def accept(self) -> tuple[Socket, None]:
        if not self.waiting:
            raise BlockingIOError(errno.EAGAIN, "it would block")
        return self.waiting.popleft(), None

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def close(self) -> None:
        self._network.listening.pop(self._port, None)
        for connected in self.waiting:
            connected.close()

    def fileno(self) -> int:
        return 1

    def setblocking(self, _: bool) -> None:
        """Nothing here blocks."""


class Network:
    """All connections."""

    def __init__(self, scheduler: Scheduler, user_timeout_s: float) -> None:
        self.scheduler = scheduler
        self.listening: dict[int, ListeningSocket] = {}
        self._user_timeout_s = user_timeout_s
        self._links: dict[tuple[Process, Process], Link] = {}
        self._sockets: list[Socket] = []
        self._next_port = _PORTS
        self._is_cut: Callable[[Process, Process], bool] = lambda *_: False
        self._isolated: set[Process] = set()

    def link(self, source: Process, target: Process) -> Link:
        if (source, target) not in self._links:
            delay = 10 ** self.scheduler.random.uniform(-4, -2)
            self._links[source, target] = Link(delay)
            self._links[source, target].is_cut = self._cuts(source, target)
        return self._links[source, target]

    def _cuts(self, source: Process, target: Process) -> bool:
        return source in self._isolated or target in self._isolated or self._is_cut(source, target)

    def cut(self, is_cut: Callable[[Process, Process], bool]) -> None:
        """From now on cut the links for which the function is True, also those that are to come; heal all others."""
        self._is_cut = is_cut
        for (source, target), link in self._links.items():
            was_cut, link.is_cut = link.is_cut, self._cuts(source, target)
            if was_cut and not link.is_cut:
                for each in self._sockets:
                    if each.process is target and each.other is source:
                        self.scheduler.at(self.scheduler.now + link.delay, each._incoming.deliver)

    def isolate(self, process: Process) -> None:
        """Cut off a process for good, whatever is cut and healed otherwise."""
        self._isolated.add(process)
        self.cut(self._is_cut)

    def delay(self, process: Process, delay: float) -> None:
        """Let whatever a process sends take so long from now on."""
        for (source, _), link in self._links.items():
            if source is process:
                link.delay = delay

    def reset(self, process: Process, other: Process) -> None:
        """Let the connections between two processes fail at both ends."""
        for each in self._sockets:
            if {each.process, each.other} == {process, other}:
                each.fail(errno.ECONNRESET)

    def end(self, process: Process, *, is_powered: bool) -> None:
        """Close what a process had; without power nobody is told."""
        for listener in [each for each in self.listening.values() if each.process is process]:
            listener.close()
        for each in self._sockets:
            if each.process is process and not each.is_closed:
                each.is_closed = True
                if is_powered:
                    each.end()

    # ------------------------------------------------------------------ of sockets

    def connect(self, address: tuple[str, int], timeout: float) -> Socket:
        scheduler = self.scheduler
        process = scheduler.current.process
        ends_at = scheduler.now + process.seconds(timeout)
        listener = self.listening.get(address[1])
        while True:
            if listener is not None:
                there, back = self.link(process, listener.process), self.link(listener.process, process)
                if not (there.is_cut or back.is_cut):
                    scheduler.wait(there.delay + back.delay)
                    listener = self.listening.get(address[1])
                    break
                if listener.process.is_alive or listener.process.is_frozen:
                    if scheduler.now >= ends_at:
                        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                    scheduler.wait(0.05)
                    continue
            break
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        capacity = scheduler.random.choice(_CAPACITIES)
        to, back_again = Pipe(self, there, capacity), Pipe(self, back, capacity)
        own = Socket(process, listener.process, back_again, to, self)
        accepted = Socket(listener.process, process, to, back_again, self)
        self._sockets += [own, accepted]
        listener.waiting.append(accepted)
        if listener.watcher is not None:
            listener.watcher.note(listener.watched)
        return own

    def listen(self) -> ListeningSocket:
        process = self.scheduler.current.process
        self._next_port += 1
        listener = ListeningSocket(self, process, self._next_port)
        self.listening[self._next_port] = listener
        return listener

    def writable(self, pipe: Pipe) -> None:
        """Tell who writes into a pipe that there is room."""
        if pipe.writer is not None:
            pipe.writer.changed()

    def closed(self, one: Socket) -> None:
        one.end()

    def may_time_out(self, pipe: Pipe) -> None:
        """Let the writer's end fail if what is under way now still is after the kernel's patience."""
        first = pipe.under_way[0] if pipe.under_way else None

        def look() -> None:
            if pipe.under_way and pipe.under_way[0] is first:
                pipe.writer.fail(errno.ETIMEDOUT)

        self.scheduler.at(self.scheduler.now + self._user_timeout_s, look)


class VirtualSocketModule:
    """In place of the module ``socket``."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def create_connection(self, address: tuple[str, int], timeout: float) -> Socket:
        return self._network.connect(address, timeout)

    def create_server(self, _: tuple[str, int], **__: object) -> ListeningSocket:
        return self._network.listen()

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


class VirtualWatcher:
    """In place of :class:`gossip.elastic.connections.selector.Watcher`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._changed: dict[Watched, None] = {}  # those that may not block
        self._thread: Thread | None = None
        self._is_rung = False

    def watch(self, watched: Watched, events: int) -> None:
        if events == watched.watched:
            return
        if events & ~watched.watched & WRITE:
            process = self._scheduler.current.process
            watched.sent_at = process.clock(self._scheduler.now)
        watched.watched = events
        one: Any = watched.socket
        one.watcher, one.watched = self, watched
        if events:
            self._changed[watched] = None

    def _found(self) -> list[tuple[Watched, int]]:
        found = []
        for watched in self._changed:
            one: Any = watched.socket
            if watched.watched and not one.is_closed and (now := one.events & watched.watched):
                found.append((watched, now))
        self._changed = dict.fromkeys(watched for watched, _ in found)  # what does not block may do so again
        return found

    def note(self, watched: Watched) -> None:
        """Note that something may not block any more."""
        one: Any = watched.socket
        if one.events & watched.watched:
            self._changed[watched] = None
            self.ring()

    def wait(self, timeout_s: float) -> list[tuple[Watched, int]]:
        found = self._found()
        if not found and not self._is_rung:
            self._thread = self._scheduler.current
            self._scheduler.wait(timeout_s)
            self._thread = None
            found = self._found()
        else:
            self._scheduler.suspend()
        self._is_rung = False
        if len(found) > 1:
            self._scheduler.random.shuffle(found)
        return found

    def ring(self) -> None:
        self._is_rung = True
        if self._thread is not None:
            self._scheduler.wake(self._thread)

    def close(self) -> None:
        """There is nothing to close."""


class Store:
    """A key-value store that outlives the processes; it may be silent for a time, or end."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.values: dict[str, bytes] = {}
        self.silent_until = 0.0
        self.has_ended = False
        self.on_write: Callable[[str, bytes], None] = lambda *_: None

    def _reached(self) -> None:
        """Go to the store, and come back in a while."""
        scheduler = self.scheduler
        if scheduler.random.random() < 0.2:
            scheduler.wait(scheduler.random.random() ** 2 * 0.01)
        while scheduler.now < self.silent_until:
            scheduler.wait(self.silent_until - scheduler.now + 1e-6)
        if self.has_ended:
            raise RuntimeError("Connection reset by peer")

    def check(self, keys: Iterable[str]) -> bool:
        self._reached()
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self._reached()
        ends_at = self.scheduler.now + _STORE_TIMEOUT_S
        while key not in self.values:
            if self.scheduler.now > ends_at:
                raise RuntimeError(f"wait timeout after {_STORE_TIMEOUT_S:g} s, keys: {key}")
            self.scheduler.wait(0.01)
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self._reached()
        self._write(key, value.encode())
        self.scheduler.suspend()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == ""
        self._reached()
        if key not in self.values:
            self._write(key, desired.encode())
        self.scheduler.suspend()
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._reached()
        total = int(self.values.get(key, b"0")) + amount
        self._write(key, str(total).encode())
        return total

    def _write(self, key: str, value: bytes) -> None:
        self.values[key] = value
        self.on_write(key, value)
