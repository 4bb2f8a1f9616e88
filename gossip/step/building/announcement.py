"""The description of what was built, logged once at the start."""

from __future__ import annotations

from collections.abc import Sequence

from loguru import logger

from gossip.algorithms import Algorithm
from gossip.compression.codec import Compression
from gossip.exchange.rank_exchanges import AnyBucket
from gossip.exchange.transport import Transport
from gossip.parameters.buckets import Bucket
from gossip.parameters.frozen_parameters import FrozenParameters
from gossip.step.building.wrapper_arguments import Arguments
from topologies import Topology

_MAX_BUCKETS_LISTED = 8


def announce(
    topology: Topology,
    algorithm: Algorithm,
    compression: Compression,
    arguments: Arguments,
    buckets: Sequence[AnyBucket],
    frozen: FrozenParameters,
    transport: Transport | None,
) -> None:
    """Log ranks, schedule, algorithm, compression, buckets, frozen parameters and transport at level INFO."""
    size, shards = topology.world_size, arguments.mesh
    ranks = f"{size} rank{'s' * (size != 1)}"
    if shards is not None:
        ranks = f"{size} group{'s' * (size != 1)} of {shards.size(1)} ranks"
    when = "bucket by bucket in backward" if arguments.updates_by_bucket else "at the end of backward"
    logger.info(
        "{}, topology {} ({}), {}, compression {}, steps {}",
        ranks,
        topology.name,
        "no period" if topology.period is None else f"period {topology.period}",
        algorithm.describe(),
        compression.describe(),
        when if arguments.step_in_backward else "in optimizer.step()",
    )
    listed = [_describe(bucket) for bucket in buckets]
    hidden = len(listed) - _MAX_BUCKETS_LISTED
    text = ", ".join(listed[:_MAX_BUCKETS_LISTED]) + (f", {hidden} more" if hidden > 0 else "")
    silent = f"; {_size(frozen.num_bytes)} of frozen parameters are not sent" if frozen else ""
    logger.info("{} bucket{}: {}{}", len(listed), "s" * (len(listed) != 1), text or "nothing to train", silent)
    if transport is not None:
        logger.info("{}", transport.describe())


def _describe(bucket: AnyBucket) -> str:
    kind = "" if isinstance(bucket, Bucket) else "buffers "
    dtype = str(bucket.block.dtype).removeprefix("torch.")
    return f"{kind}{_size(bucket.block.nbytes)} {dtype} on {bucket.block.device}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.3g} KiB"
