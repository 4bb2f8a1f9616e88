"""What a forked child inherits and must leave alone: shared sockets, and the work of threads that it does not have.

A child releases nothing. Closing one of gloo's communicators waits for threads, which a fork does not copy, and a
message on an inherited connection would be mistaken for the parent's.
"""

import ctypes
import functools
import os
import weakref
from typing import Protocol

FORKED = (
    "this process was forked from the one that trains, to which the connections to the other ranks belong; train "
    "there, or start separate processes (gossip.launch, torchrun)"
)


class Inherited(Protocol):
    """Something that can only be used in the process that made it."""

    def leave_to_parent(self) -> None:
        """Run first in a forked child: from now on refuse all use, and wait for nothing."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(holder: Inherited) -> None:
    """Have ``holder.leave_to_parent()`` called in every child that is forked while the holder exists."""
    _inherited.add(holder)
    _watch_forks()


def keep(*things: object) -> None:
    """Never release these objects: their destruction would block forever, even when the interpreter ends."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@functools.cache
def _watch_forks() -> None:
    def leave_all_to_parent() -> None:
        for holder in list(_inherited):
            holder.leave_to_parent()
        _inherited.clear()

    os.register_at_fork(after_in_child=leave_all_to_parent)
