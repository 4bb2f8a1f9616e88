"""Hashes of tensors' values, by which ranks compare them without sending them."""

import hashlib
from collections.abc import Iterable, Sequence

import torch

CHUNK_BYTES = 16 * 2**20


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return the SHA-256 of all values, in the order of their elements in memory. Holds one chunk at a time."""
    digest = hashlib.sha256()
    for tensor in tensors:
        for chunk in chunks_in_memory_order(tensor):
            digest.update(chunk.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as bytes, [nbytes], which can be compared whatever their dtype; no copy if contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def chunks_in_memory_order(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return flat chunks in the order of the elements in memory; only a tensor with gaps is copied for this."""
    flat = tensor.permute(memory_order(tensor)).reshape(-1)
    chunks: Sequence[torch.Tensor] = flat.split(max(1, CHUNK_BYTES // tensor.element_size()))
    return chunks


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions in order of descending stride."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
