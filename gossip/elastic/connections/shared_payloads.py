"""Messages to ranks on the same machine: frames state where they are in memory that both can read."""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gossip.communication.shared_buffers import BUFFERS_PER_ROW, Address, SharedFile, keep_order, machine
from gossip.elastic.connections.mesh import Mesh
from gossip.elastic.connections.peer_connection import Frame, Key, Kind, reading

_PLACE = struct.Struct("<qqqqq")  # the piece of the file, its size, where the slot is, its message's size, the reader
_MOST_READERS = 64  # per message; further readers get it in frames
_HEADER_BYTES = 8 * _MOST_READERS
_ALIGNMENT_BYTES = 64
_PAUSE_S = 0.0005


class Wait(Protocol):
    """The signature of :meth:`gossip.elastic.failure_detector.FailureDetector.wait_until`."""

    def __call__(
        self, look: Callable[[], bool], awaited: Callable[[], Sequence[int]], where: str, *, looks_every_s: float
    ) -> None: ...


class _Slot:
    """Memory for one message; the marks of ranks that have read it precede the message."""

    def __init__(self, memory: torch.Tensor, place: tuple[int, int, int, int]) -> None:
        self.marks = memory[:_HEADER_BYTES].view(torch.int64)
        self.message = memory[_HEADER_BYTES:]
        self._place = place
        self._readers: list[int] = []

    @property
    def unread(self) -> list[int]:
        """The ranks that are still reading it."""
        return [member for member, mark in zip(self._readers, self.marks.tolist(), strict=False) if not mark]

    @property
    def is_full(self) -> bool:
        """Whether no further rank can be allowed to read it."""
        return len(self._readers) == _MOST_READERS

    def clear(self) -> None:
        """Prepare it for another message."""
        self._readers = []

    def lend(self, member: int) -> bytes:
        """Allow a member to read it, and return where the member finds it."""
        number = len(self._readers)
        self.marks[number] = 0
        self._readers.append(member)
        return _PLACE.pack(*self._place, number)


class SharedPayloads:
    """The memory that this rank and others on its machine share.

    Every connected member is told where this rank's memory is, and replies if it can read it. From then on a message in
    this memory is sent as a frame that states its place, and the receiver may read it until it gives it back. The frame
    is sent after the message has been written as a whole, so a message that a rank had written in part when it died is
    never read.

    Parameters
    ----------
    mesh : Mesh
        The connections to the other ranks.
    wait : callable
        Waits for other ranks.
    """

    def __init__(self, mesh: Mesh, wait: Wait) -> None:
        self._mesh, self._wait = mesh, wait
        self._file, address = SharedFile.make()
        self._machine = machine()
        self._address = json.dumps([self._machine, address]).encode()
        self._readers: set[int] = set()
        self._slots: defaultdict[tuple[object, int], list[_Slot]] = defaultdict(list)
        self._by_memory: dict[int, _Slot] = {}
        self._files: dict[int, SharedFile] = {}
        self._pieces: dict[tuple[int, int], torch.Tensor] = {}
        self._lent: dict[int, torch.Tensor] = {}  # by the address of a message: the mark of this reader
        mesh.handlers |= {
            Kind.MEMORY: self._on_memory,
            Kind.READER: self._on_reader,
            Kind.LENT: self._on_lent,
        }
        mesh.on_given_back = self._give_back
        mesh.on_met = self._introduce

    # ------------------------------------------------------------------ the sender

    def reaches(self, member: int) -> bool:
        """Return whether a member reads this rank's memory."""
        return member in self._readers

    def take(self, place: object, like: torch.Tensor, where: str) -> torch.Tensor:
        """Return memory like a tensor that no rank reads any more.

        A rank that is ahead need not wait for one that is still reading: it takes another piece, of up to three.

        Parameters
        ----------
        place : hashable
            Identifies the purpose of the memory.
        like : Tensor
            A tensor of the required shape and dtype.
        where : str
            Where this rank is, for error texts.

        Raises
        ------
        ExchangeError
            This rank cannot continue.
        """
        slots = self._slots[place, like.nbytes]
        found: list[_Slot] = []

        def look() -> bool:
            # A lost rank may be alive and still reading: memory that it was lent is never changed again.
            left_to_lost = [slot for slot in slots if slot.unread and not self._awaited(slot)]
            if len(slots) - len(left_to_lost) < BUFFERS_PER_ROW:
                self._add_slots(slots, like.nbytes)
            found.extend(slot for slot in slots if not slot.unread)
            return bool(found)

        if not look():
            self._wait(
                look,
                lambda: sorted({reader for slot in slots for reader in self._awaited(slot)}),
                where,
                looks_every_s=_PAUSE_S,
            )
        found[0].clear()
        return found[0].message.view(like.dtype).view(like.shape)

    def can_send(self, member: int, message: torch.Tensor) -> bool:
        """Return whether a message is in memory that was taken, and a member can read it there."""
        slot = self._by_memory.get(message.data_ptr())
        return self.reaches(member) and slot is not None and not slot.is_full

    def send(self, member: int, key: Key, message: torch.Tensor) -> None:
        """Send a message in memory that was taken to a member that can read it."""
        place = self._by_memory[message.data_ptr()].lend(member)
        self._mesh.send(member, Key(Kind.LENT, *key[1:]), torch.frombuffer(bytearray(place), dtype=torch.uint8))

    def holds(self, message: torch.Tensor) -> bool:
        """Return whether a message is in memory that was taken."""
        return message.data_ptr() in self._by_memory

    def _awaited(self, slot: _Slot) -> list[int]:
        return [member for member in slot.unread if member not in self._mesh.lost]

    def _add_slots(self, slots: list[_Slot], nbytes: int) -> None:
        stride = -(-(_HEADER_BYTES + nbytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        size = BUFFERS_PER_ROW * stride
        start = self._file.grow(size)
        piece = torch.frombuffer(self._file.map(start, size), dtype=torch.uint8)
        for offset in range(0, size, stride):
            slot = _Slot(piece[offset : offset + _HEADER_BYTES + nbytes], (start, size, offset, nbytes))
            slots.append(slot)
            self._by_memory[slot.message.data_ptr()] = slot

    # ------------------------------------------------------------------ in the mesh's thread

    def _introduce(self, member: int) -> None:
        address = torch.frombuffer(bytearray(self._address), dtype=torch.uint8)
        self._mesh.send(member, Key(Kind.MEMORY), address)

    def _on_memory(self, member: int, frame: Frame) -> None:
        with reading(frame):
            where, address = json.loads(frame.payload.numpy().tobytes())
            file = SharedFile.at(Address(*address)) if where == self._machine else None
        if file is not None:
            self._files[member] = file
            self._mesh.send(member, Key(Kind.READER))

    def _on_reader(self, member: int, _: Frame) -> None:
        self._readers.add(member)

    def _on_lent(self, member: int, frame: Frame) -> None:
        with reading(frame):
            start, size, offset, nbytes, number = _PLACE.unpack(frame.payload.numpy().tobytes())
            if (member, start) not in self._pieces:
                self._pieces[member, start] = torch.frombuffer(self._files[member].map(start, size), dtype=torch.uint8)
            memory = self._pieces[member, start][offset : offset + _HEADER_BYTES + nbytes]
            slot = _Slot(memory, (start, size, offset, nbytes))
        self._lent[slot.message.data_ptr()] = slot.marks[number : number + 1]
        self._mesh.put(member, Key(Kind.MESSAGE, *frame.key[1:]), slot.message, num_bytes=0)

    def is_lent(self, payload: torch.Tensor) -> bool:
        """Return whether a payload is another rank's memory."""
        return payload.data_ptr() in self._lent

    def _give_back(self, payload: torch.Tensor) -> bool:
        """Give memory back if it is another rank's, and return whether it was; called in any thread."""
        if not self.is_lent(payload):
            return False
        keep_order()
        self._lent[payload.data_ptr()].fill_(1)
        return True


def can_share() -> bool:
    """Return whether this machine supports such memory."""
    return hasattr(os, "memfd_create")
