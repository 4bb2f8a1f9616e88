"""Counters of the Linux kernel: bytes on a network interface, and memory of this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

_RESET_PEAK = "5"  # proc(5), clear_refs


def interface_bytes(interface: str) -> tuple[int, int]:
    """Return the bytes that an interface has received and sent since its creation, including link-layer headers.

    It is one of this thread's network namespace; a ValueError says that there is none.
    """
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == interface:
            columns = [int(count) for count in counts.split()]
            return columns[0], columns[8]
    raise ValueError(f"interface must be one of /proc/net/dev, got {interface!r}")


class PeakMemory:
    """The peak of this process's resident memory above its initial value, ``before``, in bytes."""

    def __init__(self) -> None:
        self.restart()
        self.before = _status_bytes("VmRSS")

    def restart(self) -> None:
        """Give back what is free, and reset the peak; the initial value that it is compared with is kept."""
        gc.collect()
        with contextlib.suppress(AttributeError):  # malloc_trim exists in glibc only
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)

    def now(self) -> int:
        """Return the current resident memory above the initial value."""
        return max(0, _status_bytes("VmRSS") - self.before)

    def bytes(self) -> int:
        """Return the peak until now above the initial value."""
        return max(0, _status_bytes("VmHWM") - self.before)


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return 1024 * int(value.split()[0])
    raise OSError(f"/proc/self/status does not tell {key}")
