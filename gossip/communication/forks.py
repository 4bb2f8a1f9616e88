"""What a forked child inherits and must leave alone: sockets that it shares, the work of threads that it does not have.

A child gives nothing back. The end of one of gloo's communicators waits for threads, which a fork does not copy, and a
message on an inherited connection would be taken for the parent's.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from typing import Protocol

FORKED = (
    "this process was forked from the one that trains: the connections to the other ranks are that one's; train there, "
    "or start processes of their own (gossip.launch, torchrun)"
)


class Inherited(Protocol):
    """Something that is of use in the process that made it alone."""

    def leave_to_parent(self) -> None:
        """Run in a forked child, first of all: from now on refuse, and wait for nothing."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(holder: Inherited) -> None:
    """Have ``holder.leave_to_parent()`` called in every child that is forked as long as it exists."""
    _inherited.add(holder)
    _watch_forks()


def keep(*things: object) -> None:
    """Never let go of these: their end would wait for what does not come, also when the interpreter ends."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _leave_all_to_parent() -> None:
    for holder in list(_inherited):
        holder.leave_to_parent()
    _inherited.clear()
