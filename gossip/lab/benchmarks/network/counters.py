"""Counters of the Linux kernel: bytes on a network interface, and memory of this process."""

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

_RESET_PEAK = "5"  # proc(5), clear_refs


def interface_bytes(interface: str) -> tuple[int, int]:
    """Return the bytes that an interface has received and sent since its creation, including link-layer headers.

    It is one of this thread's network namespace; a ValueError says that there is none.
    """
    counts = _line("/proc/thread-self/net/dev", interface)
    if not counts:
        raise ValueError(f"interface must be one of /proc/net/dev, got {interface!r}")
    return int(counts[0]), int(counts[8])


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


class PeakDeviceMemory:
    """The peak of what torch has allocated on the current GPU, in bytes; ``before`` is 0."""

    before = 0
    now = staticmethod(torch.cuda.memory_allocated)
    bytes = staticmethod(torch.cuda.max_memory_allocated)
    restart = staticmethod(torch.cuda.reset_peak_memory_stats)


def _status_bytes(key: str) -> int:
    return 1024 * int(_line("/proc/self/status", key)[0])


def _line(path: str, key: str) -> list[str]:
    """Return what stands in the line of a key; nothing if there is none."""
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return next((values.split() for name, _, values in lines if name.strip() == key), [])
