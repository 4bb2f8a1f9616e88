"""How much memory this process can still take."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Return what the machine, and the control group of this process (version 2), still have; None if unknown."""
    found = []
    with contextlib.suppress(OSError, LookupError, ValueError):
        found.append(1024 * _entries("/proc/meminfo")["MemAvailable:"])
    with contextlib.suppress(OSError, LookupError, ValueError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = _CGROUPS / next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        for group in (own, *own.parents):
            limit = group / "memory.max"
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                used = int((group / "memory.current").read_text())
                can_be_freed = _entries(str(group / "memory.stat"))["inactive_file"]
                found.append(int(text) - used + can_be_freed)
    return min(found, default=None)


def _entries(path: str) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
