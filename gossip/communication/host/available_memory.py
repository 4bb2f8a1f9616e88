"""How much memory this process can still take, and memory that it gives back in part."""

import contextlib
import mmap
from pathlib import Path

import torch

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES = {  # of version 2 and 1 of control groups: the limit, what is used, and what of that can be freed
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes() -> int | None:
    """Return what the machine, and the control groups of this process, still have; None if unknown."""
    found = []
    with contextlib.suppress(OSError, LookupError, ValueError):
        found.append(1024 * _entries("/proc/meminfo")["MemAvailable:"])
    with contextlib.suppress(OSError, LookupError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for name in _FILES.keys() & controllers.split(","):
                most, used, freed = _FILES[name]
                own = _GROUPS / name / path.removeprefix("/")
                for group in (own, *own.parents):
                    if (limit := group / most).is_file() and (text := limit.read_text().strip()) != "max":
                        can_be_freed = _entries(str(group / "memory.stat"))[freed]
                        found.append(int(text) - int((group / used).read_text()) + can_be_freed)
    return min(found, default=None)


def size_text(num_bytes: int) -> str:
    """Return a size of memory in GB, or below a tenth of one in MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"


def _entries(path: str) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


class ShrinkingMemory:
    """Room for a copy that can be let go in part; the memory of other tensors is freed as a whole, or not at all.

    Raises MemoryError: there is too little; the text says how much is needed and available.

    Attributes
    ----------
    values : Tensor, [num_bytes], uint8, on the CPU
        The bytes, zero in the beginning; each page takes memory once it is written.
    num_released : int
        The number of bytes at the beginning that have been let go, and are lost.
    """

    def __init__(self, num_bytes: int) -> None:
        available = available_bytes()
        if available is not None and available < num_bytes:
            raise MemoryError(f"a copy takes {size_text(num_bytes)}, but {size_text(available)} are available")
        try:
            self._map = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"a copy takes {size_text(num_bytes)}, which the system refuses: {error}") from error
        self.values = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]
        self.num_released = 0

    def release(self, end: int) -> None:
        """Let go the whole pages before byte ``end``."""
        end -= end % mmap.PAGESIZE
        if end > self.num_released:
            self._map.madvise(mmap.MADV_DONTNEED, self.num_released, end - self.num_released)
            self.num_released = end
