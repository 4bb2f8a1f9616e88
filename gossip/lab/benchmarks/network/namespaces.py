"""Unnamed network namespaces: each exists as long as a process is in it or holds it open, and no longer.

Nothing therefore has to be removed, and nothing can be left behind, however this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_CURRENT = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000  # sched.h


class Namespace:
    """A new network namespace, held open by this process by the descriptor ``file``. Needs Linux and root.

    An OSError says that the kernel does not permit one.
    """

    def __init__(self) -> None:
        with _returning():
            _call("unshare", _CLONE_NEWNET)
            self.file = os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def path(self) -> str:
        """The path by which other processes reach the namespace."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread into the namespace within the block; processes and sockets started there remain there."""
        with _returning():
            _call("setns", self.file, _CLONE_NEWNET)
            yield

    def close(self) -> None:
        """Release the namespace; it ceases to exist with the last process inside it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def enter(path: str) -> None:
    """Move this thread, and threads that it starts from now on, into a namespace of another process for good."""
    with open(path) as file:
        _call("setns", file.fileno(), _CLONE_NEWNET)


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    with open(_CURRENT) as here:
        try:
            yield
        finally:
            _call("setns", here.fileno(), _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    """Make a system call by the C library (os.unshare and os.setns require Python 3.12)."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
