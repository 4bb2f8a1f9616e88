"""Which buffers are saved, and the policy ``buffers="average"``: float buffers are exchanged like parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gossip.compression.codec import BucketShape
from gossip.compression.conversation import accumulation_dtype
from gossip.errors import GossipError
from gossip.parameters.buckets import is_mixable
from gossip.parameters.names import bare, buffer_named, named_buffers
from gossip.private_torch import names_of_transient_buffers


@dataclass(frozen=True, eq=False)
class BufferBucket:
    """The float buffers of one device, copied into one flat block of float32 or float64 when it is sent or mixed.

    Modules replace or write their buffers as they like, so the block, [numel], is a copy and not the buffers' memory,
    and buffers are looked up by their names each time. In launch order these buckets come after all parameters.
    """

    index: int
    names: tuple[str, ...]
    block: torch.Tensor
    _module: nn.Module
    _numels: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...] = ()
    places: frozenset[int] = frozenset()

    @property
    def shape(self) -> BucketShape:
        """What a codec knows about the bucket."""
        return BucketShape(self.index, self.block)

    @torch.no_grad()
    def reclaim(self) -> None:
        """Copy the buffers' values into the block.

        Raises GossipError: a buffer is gone, or has another size or dtype; the text names it.
        """
        for name, part in zip(self.names, self.block.split(self._numels), strict=True):
            buffer = self._buffer(name, part)
            part.copy_(as_real(buffer).reshape(-1))

    def release(self) -> None:
        """Do nothing: the buffers are where they were."""

    @torch.no_grad()
    def written(self) -> None:
        """Copy the block's values into the buffers."""
        for name, part in zip(self.names, self.block.split(self._numels), strict=True):
            buffer = as_real(self._buffer(name, part))
            buffer.copy_(part.view(buffer.shape))

    def _buffer(self, name: str, part: torch.Tensor) -> torch.Tensor:
        buffer = buffer_named(self._module, name)
        if buffer is None:
            raise GossipError(
                f'buffer {name!r} is gone; buffers="average" exchanges those that existed when the module was '
                "wrapped: keep them, or wrap the module again"
            )
        values = as_real(buffer)
        if values.numel() != part.numel() or accumulation_dtype(values.dtype) != part.dtype:
            raise GossipError(
                f"buffer {name!r} is now {buffer.dtype} {list(buffer.shape)}, unlike when the module was "
                'wrapped; buffers="average" needs buffers that keep their size and dtype'
            )
        return buffer


def make_buffer_buckets(module: nn.Module, first_index: int) -> tuple[BufferBucket, ...]:
    """Make one bucket per device and accumulation dtype of the float and complex buffers of ``module``."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, int]]] = {}
    for name, buffer in named_buffers(module):
        values = as_real(buffer)
        if is_averaged(buffer) and values.numel():
            kind = (accumulation_dtype(values.dtype), values.device)
            kinds.setdefault(kind, []).append((name, values.numel()))
    return tuple(
        BufferBucket(
            index=first_index + place,
            names=tuple(name for name, _ in entries),
            block=torch.zeros(sum(numel for _, numel in entries), dtype=dtype, device=device),
            _module=module,
            _numels=tuple(numel for _, numel in entries),
        )
        for place, ((dtype, device), entries) in enumerate(kinds.items())
    )


def is_averaged(buffer: torch.Tensor) -> bool:
    """Return whether the mean over ranks is meaningful; otherwise rank 0's values are used."""
    return is_mixable(buffer) or buffer.is_complex()


def as_real(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view of complex values as real ones, [..., 2], in which they are summed; others as they are."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def unfit_buffers(module: nn.Module, *saved: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of the buffers that cannot be restored from what some ranks have saved, and why, in words."""
    persistent = {name for name, _ in persistent_buffers(module)}
    kinds = {name: (buffer.shape, buffer.dtype) for name, buffer in named_buffers(module) if name not in persistent}
    return {
        name: f"buffer {name!r}, which is not persistent and has another shape or dtype here"
        for name, kind in kinds.items()
        if any(name not in of_rank or (of_rank[name].shape, of_rank[name].dtype) != kind for of_rank in saved)
    }


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return name and tensor of the buffers in the module's state_dict, each once."""
    transient = {
        bare(f"{prefix}.{name}" if prefix else name)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in names_of_transient_buffers(part)
    }
    return ((name, buffer) for name, buffer in named_buffers(module) if name not in transient)
