"""Where the memory of a model goes."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

READ_BY_OTHERS = "messages that others read on this machine"
Held = Iterable[object]


@dataclass(frozen=True)
class MemoryUse:
    """What a rank holds for training; ``str()`` is a table.

    Attributes
    ----------
    num_parameters : int
        The number of elements of all parameters, of a sharded module those of this rank's shard.
    bytes_of : mapping of str to int
        The bytes by purpose at the moment. Tensors that share memory count once, for the first purpose.
    in_training : mapping of str to int or None
        The bytes by purpose between steps, once each parameter has been updated and each bucket exchanged: predicted by
        what a step and exchanges of stand-ins without memory keep. None where these do not tell.
    num_spare_bytes : int
        How much more others can come to read, if a rank that is ahead does not wait for those that are still reading.
    """

    num_parameters: int
    bytes_of: Mapping[str, int]
    in_training: Mapping[str, int | None]
    num_spare_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes for all purposes at the moment."""
        return sum(self.bytes_of.values())

    def __str__(self) -> str:
        known = [num_bytes for num_bytes in self.in_training.values() if num_bytes is not None]
        rows = [(purpose, num_bytes, self.in_training[purpose]) for purpose, num_bytes in self.bytes_of.items()]
        in_all = "in all" if len(known) == len(rows) else "in all that is known"
        lines = [f"{'':41}  {'bytes now':>15}  per parameter  {'in training':>15}  per parameter"]
        for purpose, *columns in (*rows, (in_all, self.num_bytes, sum(known))):
            lines.append(f"{purpose:41}" + "".join(map(self._column, columns)))
        if self.num_spare_bytes:
            lines.append(f"{'more, while readers are behind: up to':41}{'':32}{self._column(self.num_spare_bytes)}")
        return "\n".join(lines)

    def _column(self, num_bytes: int | None) -> str:
        if num_bytes is None:
            return f"  {'known after the first steps':>30}"
        return f"  {num_bytes:>15,}  {num_bytes / max(1, self.num_parameters):>13.2f}"


def memory_use(num_parameters: int, held: Mapping[str, tuple[Held, Held | None]], num_buffers: int = 1) -> MemoryUse:
    """Return the memory of the tensors in the objects for each purpose, now and in training (None: unknown).

    ``num_buffers`` is how many messages others can come to read in place of one.
    """
    now = _num_bytes({purpose: objects for purpose, (objects, _) in held.items()})
    known = _num_bytes({purpose: objects for purpose, (_, objects) in held.items() if objects is not None})
    in_training = {purpose: known.get(purpose) for purpose in held}
    return MemoryUse(num_parameters, now, in_training, (num_buffers - 1) * known.get(READ_BY_OTHERS, 0))


def _num_bytes(held: Mapping[str, Held]) -> dict[str, int]:
    counted: set[tuple[torch.device, int]] = set()
    bytes_of = {}
    for purpose, objects in held.items():
        bytes_of[purpose] = 0
        for tensor in _tensors_in(objects, set()):
            storage = tensor.untyped_storage()
            place = tensor.device, storage._cdata if tensor.is_meta else storage.data_ptr()
            if place not in counted:
                counted.add(place)
                bytes_of[purpose] += storage.nbytes()
    return bytes_of


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, and in the attributes of what the compressions are made of."""
    if isinstance(value, torch.Tensor):
        yield value.to_local() if hasattr(value, "to_local") else value  # a DTensor, which takes long to import
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, str | bytes):
        parts = ()
    elif isinstance(value, Collection):
        parts = value
    else:
        parts = getattr(value, "__dict__", {}).values() if type(value).__module__.startswith("gossip.") else ()
    for part in parts:
        yield from _tensors_in(part, seen)
