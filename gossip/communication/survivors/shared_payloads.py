"""Messages to ranks on the same machine: frames say where they lie in memory that both can read."""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gossip.communication.shared_buffers import BUFFERS_PER_ROW, Address, SharedFile, keep_order, machine
from gossip.communication.survivors.mesh import Mesh
from gossip.communication.survivors.peer_connection import Frame, Key, Kind

_PLACE = struct.Struct("<qqqqq")  # the piece of the file, its size, where the slot is, its message's size, the reader
_MOST_READERS = 64  # of a message; others get it in frames
_HEADER_BYTES = 8 * _MOST_READERS
_ALIGNMENT_BYTES = 64
_PAUSE_S = 0.0005


class Wait(Protocol):
    """:meth:`gossip.communication.survivors.patient_waits.PatientWorld.wait_until`."""

    def __call__(
        self, look: Callable[[], bool], awaited: Callable[[], Sequence[int]], where: str, *, looks_every_s: float
    ) -> None: ...


class _Slot:
    """Memory for one message, and who has not read it yet: marks of the readers come before the message."""

    def __init__(self, memory: torch.Tensor, place: tuple[int, int, int, int]) -> None:
        self.marks = memory[:_HEADER_BYTES].view(torch.int64)
        self.message = memory[_HEADER_BYTES:]
        self._place = place
        self._readers: list[int] = []

    @property
    def unread(self) -> list[int]:
        """Who reads it still."""
        return [member for member, mark in zip(self._readers, self.marks.tolist(), strict=False) if not mark]

    @property
    def is_full(self) -> bool:
        """Whether nobody else can be let read it."""
        return len(self._readers) == _MOST_READERS

    def clear(self) -> None:
        """Use it for another message."""
        self._readers = []

    def lend(self, member: int) -> bytes:
        """Let a member read it; where it finds it."""
        number = len(self._readers)
        self.marks[number] = 0
        self._readers.append(member)
        return _PLACE.pack(*self._place, number)


class SharedPayloads:
    """What this rank and others of its machine have of each other's memory.

    Whoever is connected is told where this rank's memory is, and says so if he can read it: from then on a message in
    it is sent as a frame that says where it lies, and is his to read until he gives it back. The frame comes after the
    message has been written as a whole, so that what a rank had written in part when it died is never read.

    Parameters
    ----------
    mesh : Mesh
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
        self._lent: dict[int, torch.Tensor] = {}  # by where a message lies: the mark of this reader
        mesh.handlers |= {
            Kind.MEMORY: self._on_memory,
            Kind.READER: self._on_reader,
            Kind.LENT: self._on_lent,
        }
        mesh.on_given_back = self._give_back
        mesh.on_met = self._introduce

    # ------------------------------------------------------------------ the one who sends

    def reaches(self, member: int) -> bool:
        """Whether a member reads this rank's memory."""
        return member in self._readers

    def take(self, place: object, like: torch.Tensor, where: str) -> torch.Tensor:
        """Memory like a tensor that nobody reads any more.

        A rank that is ahead need not wait for one that still reads: it takes another piece then, up to three.

        Parameters
        ----------
        place : hashable
            What it is for.
        like : Tensor
        where : str
            For errors.

        Raises
        ------
        ExchangeError
            This rank cannot go on.
        """
        slots = self._slots[place, like.nbytes]
        found: list[_Slot] = []

        def look() -> bool:
            # Who is lost may live and read all the same: what lies before him stays as it is, for good.
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
        """Whether a message lies in memory that was taken, and a member can read it there."""
        slot = self._by_memory.get(message.data_ptr())
        return self.reaches(member) and slot is not None and not slot.is_full

    def send(self, member: int, key: Key, message: torch.Tensor) -> None:
        """Let a member that can read it have a message in memory that was taken."""
        place = self._by_memory[message.data_ptr()].lend(member)
        self._mesh.send(member, Key(Kind.LENT, *key[1:]), torch.frombuffer(bytearray(place), dtype=torch.uint8))

    def holds(self, message: torch.Tensor) -> bool:
        """Whether a message lies in memory that was taken."""
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
        where, address = json.loads(frame.payload.numpy().tobytes())
        file = SharedFile.at(Address(*address)) if where == self._machine else None
        if file is not None:
            self._files[member] = file
            self._mesh.send(member, Key(Kind.READER))

    def _on_reader(self, member: int, _: Frame) -> None:
        self._readers.add(member)

    def _on_lent(self, member: int, frame: Frame) -> None:
        start, size, offset, nbytes, number = _PLACE.unpack(frame.payload.numpy().tobytes())
        if (member, start) not in self._pieces:
            self._pieces[member, start] = torch.frombuffer(self._files[member].map(start, size), dtype=torch.uint8)
        memory = self._pieces[member, start][offset : offset + _HEADER_BYTES + nbytes]
        slot = _Slot(memory, (start, size, offset, nbytes))
        self._lent[slot.message.data_ptr()] = slot.marks[number : number + 1]
        self._mesh.put(member, Key(Kind.MESSAGE, *frame.key[1:]), slot.message, num_bytes=0)

    def is_lent(self, payload: torch.Tensor) -> bool:
        """Whether it is another rank's memory."""
        return payload.data_ptr() in self._lent

    def _give_back(self, payload: torch.Tensor) -> bool:
        """Whether it was another rank's memory; in whatever thread."""
        if not self.is_lent(payload):
            return False
        keep_order()
        self._lent[payload.data_ptr()].fill_(1)
        return True


def can_share() -> bool:
    """Whether this machine has memory of that kind."""
    return hasattr(os, "memfd_create")
