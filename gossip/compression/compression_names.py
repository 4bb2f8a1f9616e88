"""Compressions by name."""

from collections.abc import Callable

import torch

from gossip.compression.choco import Choco
from gossip.compression.codec import Compression
from gossip.compression.modulo import ModuloQuantization
from gossip.compression.powergossip import PowerGossip
from gossip.compression.value_codecs import Cast, Uncompressed
from topologies.registry import Registry

COMPRESSIONS: Registry[Callable[..., Compression]] = Registry(
    "compression",
    {
        "bf16": lambda: Cast(torch.bfloat16),
        "fp16": lambda: Cast(torch.float16),
        "int8": lambda: ModuloQuantization(8),
        "int4": lambda: ModuloQuantization(4),
        "choco": Choco,
        "powergossip": PowerGossip,
    },
)
"""With their default constants; ``@gossip.COMPRESSIONS.register(name)`` adds a class of your own."""


def resolve_compression(compression: str | Compression | None) -> Compression:
    """Return ``compression`` itself, or the one of that name; None means that the values are sent as they are.

    Raises ValueError, TypeError: there is no compression of that name, or the argument is neither a name nor a
    compression.
    """
    if compression is None:
        return Uncompressed()
    if isinstance(compression, Compression):
        return compression
    if not isinstance(compression, str):
        raise TypeError(
            f"compression must be a name or a gossip.Compression, got {compression!r}; pass e.g. ModuloQuantization(8)"
        )
    return COMPRESSIONS.get(compression)()
