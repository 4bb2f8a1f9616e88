"""Messages to ranks on the same machine: frames state where they are in memory that both can read."""

import collections
import json
import os
import struct
from collections.abc import Callable

import torch

from gossip.communication.liveness.process_liveness import GONE, Process, own_process, state_of
from gossip.communication.shared_buffers import BUFFERS_PER_ROW, Address, Arena, Buffer, machine
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Frame, Key, Kind, reading

_PLACE = struct.Struct("<QQ")  # the number of the buffer, and the reader's place in it
_MOST_READERS = 64  # per message; further readers get it in frames
_PAUSE_S = 0.0005


class _Slot:
    """A buffer of this rank, and the ranks that were allowed to read the message that it holds."""

    def __init__(self, number: int, buffer: Buffer) -> None:
        self.message = buffer.message
        self.readers: list[int] = []
        self._number, self._buffer, self.num_lent = number, buffer, 0

    @property
    def unread(self) -> list[int]:
        """The ranks that are still reading it."""
        return [self.readers[place] for place in self._buffer.readers]

    def count_as_read(self, has_ended: Callable[[int], bool]) -> None:
        """Wait no longer for readers that have ended."""
        for place in self._buffer.readers:
            if has_ended(self.readers[place]):
                self._buffer.done(place)

    def lend(self, member: int) -> bytes:
        """Allow a member to read it, and return where the member finds it."""
        place = len(self.readers)
        self.readers.append(member)
        self.num_lent += 1
        self._buffer.publish({place: self.num_lent})
        return _PLACE.pack(self._number, place)


class SharedPayloads:
    """The memory that this rank and others on its machine share.

    Every connected member is told where this rank's memory is, and replies if it can read it. From then on a message in
    this memory is sent as a frame that states its place, and the receiver may read it until it gives it back. The frame
    is sent after the message has been written as a whole, so a message that a rank had written in part when it died is
    never read. What was lent to a process that has ended is used again; of what other ranks had lent, a lost one's goes
    with the last message of it. ``wait`` is :meth:`gossip.elastic.failure_detector.FailureDetector.wait_until`.
    """

    def __init__(self, mesh: Mesh, wait: Callable[..., None]) -> None:
        self._mesh, self._wait = mesh, wait
        self._arena, address = Arena.make(_MOST_READERS)
        self._machine = machine()
        self._process = own_process()
        self._address = json.dumps([self._machine, address, self._process]).encode()
        self._processes: dict[int, Process] = {}
        self._num_lost = 0
        self._readers: set[int] = set()
        self._slots: collections.defaultdict[tuple[object, int], list[_Slot]] = collections.defaultdict(list)
        self._by_memory: dict[int, _Slot] = {}
        self._arenas: dict[int, Arena] = {}
        # By the address of a message: whose it is, and this rank's place as its reader.
        self._lent: dict[int, tuple[int, Buffer, int]] = {}
        mesh.handlers |= {
            Kind.MEMORY: self._on_memory,
            Kind.READER: self._on_reader,
            Kind.LENT: self._on_lent,
        }
        mesh.on_given_back = self._give_back
        mesh.on_met = self._introduce

    @property
    def written(self) -> list[torch.Tensor]:
        """The memory that has held a message; the rest has no pages yet."""
        return [slot.message for slot in self._by_memory.values() if slot.num_lent]

    # ------------------------------------------------------------------ the sender

    def reaches(self, member: int) -> bool:
        """Return whether a member reads this rank's memory."""
        return member in self._readers

    def take(self, place: object, like: torch.Tensor, where: str) -> torch.Tensor:
        """Return memory like a tensor that no rank reads any more.

        A rank that is ahead need not wait for one that is still reading: it takes another piece, of up to three of a
        ``place``, which is hashable. ``where`` is for error texts.
        """
        self._release_lost()
        slots = self._slots[place, like.nbytes]
        found: list[_Slot] = []

        def look() -> bool:
            # A lost rank may be alive and still reading: memory that it was lent is not changed until its process ends.
            left_to_lost = [slot for slot in slots if slot.unread and not self._awaited(slot)]
            for slot in left_to_lost:
                slot.count_as_read(self._has_ended)
            left_to_lost = [slot for slot in left_to_lost if slot.unread]
            if len(slots) - len(left_to_lost) < BUFFERS_PER_ROW:
                first = len(self._arena.buffers)
                added = [_Slot(*one) for one in enumerate(self._arena.add(0, like.nbytes), first)]
                slots.extend(added)
                self._by_memory |= {slot.message.data_ptr(): slot for slot in added}
            found.extend(slot for slot in slots if not slot.unread)
            return bool(found)

        if not look():
            self._wait(
                look,
                lambda: sorted({reader for slot in slots for reader in self._awaited(slot)}),
                where,
                looks_every_s=_PAUSE_S,
            )
        found[0].readers.clear()
        return found[0].message.view(like.dtype).view(like.shape)

    def send(self, member: int, key: Key, message: torch.Tensor) -> bool:
        """Send a message if it is in memory that was taken and a member can read it there; return whether it is."""
        slot = self._by_memory.get(message.data_ptr())
        if slot is None or not self.reaches(member) or len(slot.readers) >= _MOST_READERS:
            return False
        place = torch.frombuffer(bytearray(slot.lend(member)), dtype=torch.uint8)
        self._mesh.send(member, Key(Kind.LENT, *key[1:]), place)
        return True

    def holds(self, message: torch.Tensor) -> bool:
        """Return whether a message is in memory that was taken."""
        return message.data_ptr() in self._by_memory

    def _awaited(self, slot: _Slot) -> list[int]:
        return [member for member in slot.unread if member not in self._mesh.lost]

    def _has_ended(self, member: int) -> bool:
        return member in self._processes and state_of(self._processes[member], self._process) == GONE

    def _release_lost(self) -> None:
        """Let go of the memory of lost members, except for messages that are still to be given back."""
        if self._num_lost == len(self._mesh.lost):
            return
        lost = set(self._mesh.lost)
        self._num_lost = len(lost)
        for member in lost:
            self._arenas.pop(member, None)
            self._readers.discard(member)
        for address, (member, buffer, place) in list(self._lent.items()):
            if member in lost and buffer.is_read_by(place):
                self._lent.pop(address, None)

    # ------------------------------------------------------------------ in the mesh's thread

    def _introduce(self, member: int) -> None:
        address = torch.frombuffer(bytearray(self._address), dtype=torch.uint8)
        self._mesh.send(member, Key(Kind.MEMORY), address)

    def _on_memory(self, member: int, frame: Frame) -> None:
        with reading(frame):
            where, address, process = json.loads(frame.payload.numpy().tobytes())
            self._processes[member] = Process(*process)
            arena = Arena.at(Address(*address), _MOST_READERS) if where == self._machine else None
        if arena is not None:
            self._arenas[member] = arena
            self._mesh.send(member, Key(Kind.READER))

    def _on_reader(self, member: int, _: Frame) -> None:
        self._readers.add(member)

    def _on_lent(self, member: int, frame: Frame) -> None:
        with reading(frame):
            number, place = _PLACE.unpack(frame.payload.numpy().tobytes())
            arena = self._arenas[member]
            if number >= len(arena.buffers):
                collections.deque(arena.new_buffers(), maxlen=0)
            buffer = arena.buffers[number]
            buffer.is_read_by(place)  # raises if there is no such place
        self._lent[buffer.message.data_ptr()] = member, buffer, place
        self._mesh.put(member, Key(Kind.MESSAGE, *frame.key[1:]), buffer.message, num_bytes=0)

    def is_lent(self, payload: torch.Tensor) -> bool:
        """Return whether a payload is another rank's memory."""
        return payload.data_ptr() in self._lent

    def _give_back(self, payload: torch.Tensor) -> bool:
        """Give memory back if it is another rank's, and return whether it was; called in any thread."""
        if not self.is_lent(payload):
            return False
        member, buffer, place = self._lent[payload.data_ptr()]
        buffer.done(place)
        if member in self._mesh.lost:
            self._lent.pop(payload.data_ptr(), None)
        return True


def can_share() -> bool:
    """Return whether this machine supports such memory."""
    return hasattr(os, "memfd_create")
