"""One message through a transport, without a model."""

from __future__ import annotations

import torch

from gossip import BucketShape, Compression, Exchange, Transport, World
from gossip.compression.value_codecs import Uncompressed
from topologies import Round


def start(
    transport: Transport,
    message: torch.Tensor,
    round_: Round,
    *,
    world: World,
    step: int,
    bucket: int,
    compression: Compression | None = None,
) -> Exchange:
    """Start the exchange of ``message``; the codec is new, so that several may be under way."""
    codec = (compression or Uncompressed()).codec(BucketShape(bucket, message), world.rank)
    return transport.start(codec.exchange(message, round_, step), round_, step=step, bucket=bucket)
