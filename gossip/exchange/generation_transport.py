"""The transport for ranks that may be lost, in successive generations."""

from __future__ import annotations

from collections.abc import Sequence

from gossip.algorithms import Algorithm, Asynchronous
from gossip.communication.world import World
from gossip.compression.codec import Compression
from gossip.elastic.elastic_world import ElasticWorld
from gossip.exchange.edge_transport import EdgeTransport
from gossip.exchange.pair_averaging import PairAverager
from gossip.exchange.pair_transport import PairTransport
from gossip.exchange.transport import Transport
from topologies import Topology


def make_generation_transport(
    world: World,
    schedule: Topology,
    *,
    algorithm: Algorithm,
    compression: Compression,
    soft_deadline_s: float | None,
    members: Sequence[int] | None = None,
    before: Transport | None = None,
) -> Transport:
    """Return the transport of a generation."""
    assert isinstance(world, ElasticWorld)
    if isinstance(algorithm, Asynchronous):
        averager = before.averager if isinstance(before, PairTransport) else PairAverager(world, algorithm.history)
        return PairTransport(world, schedule, members=members, averager=averager, max_staleness=algorithm.max_staleness)
    follows_up = (algorithm.compression or compression).follows_up
    return EdgeTransport(world, schedule, members=members, follows_up=follows_up, soft_deadline_s=soft_deadline_s)
