"""Messages to ranks on the same machine: frames say where they lie in memory that both can read."""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from gossip.communication.shared_buffers import BUFFERS_PER_ROW, Address, SharedFile
from gossip.communication.shared_memory import machine
from gossip.communication.survivors.mesh import Mesh
from gossip.communication.survivors.peer_connection import Frame, Key, Kind

_PLACE = struct.Struct("<qqqq")  # the piece of the file, its size, where in it the message begins, and its size
_ALIGNMENT_BYTES = 64

Wait = Callable[[Callable[[], bool], Callable[[], Sequence[int]], str], None]
"""Of :meth:`gossip.communication.survivors.patient_waits.PatientWaits.wait_until`."""


class _Slot:
    """Memory for one message, and who has not read it yet."""

    def __init__(self, memory: torch.Tensor, place: bytes) -> None:
        self.memory = memory
        self.place = place
        self.readers: set[int] = set()


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
        self._address = json.dumps([machine(), address]).encode()
        self._readers: set[int] = set()
        self._slots: defaultdict[tuple[object, int], list[_Slot]] = defaultdict(list)
        self._by_memory: dict[int, _Slot] = {}
        self._by_place: dict[bytes, _Slot] = {}
        self._files: dict[int, SharedFile] = {}
        self._pieces: dict[tuple[int, int], torch.Tensor] = {}
        self._lent: dict[int, tuple[int, bytes]] = {}  # by where they lie: whose messages this rank reads
        mesh.handlers |= {
            Kind.MEMORY: self._on_memory,
            Kind.READER: self._on_reader,
            Kind.LENT: self._on_lent,
            Kind.READ: self._on_read,
        }
        mesh.on_given_back = self._give_back
        mesh.on_met = self._introduce

    # ------------------------------------------------------------------ the one who sends

    def can_read(self, member: int) -> bool:
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
            found.extend(slot for slot in slots if not self._unread(slot))
            return bool(found)

        with self._mesh.changed:
            is_free = look()
        if not is_free and not slots:
            self._add_slots(slots, like.nbytes)
            found = slots[:1]
        elif not is_free:
            self._wait(look, lambda: sorted({reader for slot in slots for reader in self._unread(slot)}), where)
        return found[0].memory.view(like.dtype).view(like.shape)

    def send(self, member: int, key: Key, message: torch.Tensor) -> None:
        """Let a member that can read it have a message in memory that was taken."""
        slot = self._by_memory[message.data_ptr()]
        with self._mesh.changed:
            slot.readers.add(member)
        place = torch.frombuffer(bytearray(slot.place), dtype=torch.uint8)
        self._mesh.send(member, Key(Kind.LENT, *key[1:]), place)

    def holds(self, message: torch.Tensor) -> bool:
        """Whether a message lies in memory that was taken."""
        return message.data_ptr() in self._by_memory

    def _unread(self, slot: _Slot) -> set[int]:
        return {member for member in slot.readers if member not in self._mesh.lost}

    def _add_slots(self, slots: list[_Slot], nbytes: int) -> None:
        stride = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        size = BUFFERS_PER_ROW * stride
        start = self._file.grow(size)
        piece = torch.frombuffer(self._file.map(start, size), dtype=torch.uint8)
        for offset in range(0, size, stride):
            slot = _Slot(piece[offset : offset + nbytes], _PLACE.pack(start, size, offset, nbytes))
            slots.append(slot)
            self._by_memory[slot.memory.data_ptr()] = self._by_place[slot.place] = slot

    # ------------------------------------------------------------------ in the mesh's thread

    def _introduce(self, member: int) -> None:
        address = torch.frombuffer(bytearray(self._address), dtype=torch.uint8)
        self._mesh.send(member, Key(Kind.MEMORY), address)

    def _on_memory(self, member: int, frame: Frame) -> None:
        where, address = json.loads(frame.payload.numpy().tobytes())
        file = SharedFile.at(Address(*address)) if where == machine() else None
        if file is not None:
            self._files[member] = file
            self._mesh.send(member, Key(Kind.READER))

    def _on_reader(self, member: int, _: Frame) -> None:
        self._readers.add(member)

    def _on_lent(self, member: int, frame: Frame) -> None:
        place = frame.payload.numpy().tobytes()
        start, size, offset, nbytes = _PLACE.unpack(place)
        if (member, start) not in self._pieces:
            self._pieces[member, start] = torch.frombuffer(self._files[member].map(start, size), dtype=torch.uint8)
        message = self._pieces[member, start][offset : offset + nbytes]
        self._lent[message.data_ptr()] = member, place
        self._mesh.put(member, Key(Kind.MESSAGE, *frame.key[1:]), message, num_bytes=0)

    def _on_read(self, member: int, frame: Frame) -> None:
        with self._mesh.changed:
            self._by_place[frame.payload.numpy().tobytes()].readers.discard(member)
            self._mesh.changed.notify_all()

    def is_lent(self, payload: torch.Tensor) -> bool:
        """Whether it is another rank's memory."""
        return payload.data_ptr() in self._lent

    def _give_back(self, payload: torch.Tensor) -> bool:
        """Whether it was another rank's memory; in whatever thread."""
        if not self.is_lent(payload):
            return False
        member, place = self._lent[payload.data_ptr()]
        self._mesh.send(member, Key(Kind.READ), torch.frombuffer(bytearray(place), dtype=torch.uint8))
        return True


def can_share() -> bool:
    """Whether this machine has memory of that kind."""
    return hasattr(os, "memfd_create")
