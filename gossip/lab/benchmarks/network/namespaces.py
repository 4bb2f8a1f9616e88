"""Unnamed network namespaces: each exists as long as a process is in it or holds it open, and no longer.

Nothing therefore has to be removed, and nothing can be left behind, however this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000  # sched.h


class Namespace:
    """A new network namespace, held open by this process. Needs Linux and root.

    Attributes
    ----------
    file : int
        The descriptor that holds the namespace open.

    Raises
    ------
    OSError
        The kernel does not permit a new namespace.
    """

    def __init__(self) -> None:
        here = _open_current()
        try:
            _call("unshare", _CLONE_NEWNET)
            try:
                self.file = _open_current()
            finally:
                _call("setns", here, _CLONE_NEWNET)
        finally:
            os.close(here)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread into the namespace within the block; processes and sockets started there remain there."""
        here = _open_current()
        try:
            _call("setns", self.file, _CLONE_NEWNET)
            try:
                yield
            finally:
                _call("setns", here, _CLONE_NEWNET)
        finally:
            os.close(here)

    def close(self) -> None:
        """Release the namespace; it ceases to exist with the last process inside it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _open_current() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    """Make a system call by the C library (os.unshare and os.setns require Python 3.12)."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
