"""Where the memory of a model goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class MemoryUse:
    """What a rank holds for training at the moment; ``str()`` is a table.

    Attributes
    ----------
    num_parameters : int
        The number of elements of all parameters, of a sharded module those of this rank's shard.
    bytes_of : mapping of str to int
        The bytes by purpose. Tensors that share memory count once, for the first purpose.
    """

    num_parameters: int
    bytes_of: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """The bytes for all purposes."""
        return sum(self.bytes_of.values())

    def __str__(self) -> str:
        rows = [*self.bytes_of.items(), ("in all", self.num_bytes)]
        width = max(len(purpose) for purpose, _ in rows)
        lines = [f"{'':{width}}  {'bytes':>15}  per parameter"]
        for purpose, num_bytes in rows:
            lines.append(f"{purpose:{width}}  {num_bytes:>15,}  {num_bytes / max(1, self.num_parameters):>13.2f}")
        return "\n".join(lines)


def memory_use(num_parameters: int, held: Mapping[str, Iterable[object]]) -> MemoryUse:
    """Return the memory of the tensors in the objects for each purpose."""
    counted: set[tuple[torch.device, int]] = set()
    bytes_of = {}
    for purpose, objects in held.items():
        bytes_of[purpose] = 0
        for tensor in _tensors_in(objects, set()):
            storage = tensor.untyped_storage()
            if (place := (tensor.device, storage.data_ptr())) not in counted:
                counted.add(place)
                bytes_of[purpose] += storage.nbytes()
    return MemoryUse(num_parameters, bytes_of)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, and in the attributes of what the compressions are made of."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, str | bytes):
        parts = ()
    elif isinstance(value, Iterable):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values() if type(value).__module__.startswith("gossip.") else ()
    for part in parts:
        yield from _tensors_in(part, seen)
