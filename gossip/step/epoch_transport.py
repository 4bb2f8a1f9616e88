"""The transport for ranks that may be lost, in successive epochs."""

from __future__ import annotations

from collections.abc import Sequence

from gossip.algorithms import Algorithm, Asynchronous
from gossip.communication.survivors.averager import Averager
from gossip.communication.survivors.edge_transport import EdgeTransport
from gossip.communication.survivors.living_world import LivingWorld
from gossip.communication.survivors.pair_transport import PairTransport
from gossip.communication.transport import Transport
from gossip.communication.world import World
from gossip.compression.codec import Compression
from topologies import Topology


def make_epoch_transport(
    world: World,
    schedule: Topology,
    *,
    algorithm: Algorithm,
    compression: Compression,
    soft_deadline_s: float | None,
    members: Sequence[int] | None = None,
    before: Transport | None = None,
) -> Transport:
    """Return the transport of an epoch.

    Parameters
    ----------
    world : LivingWorld
        The ranks.
    schedule : Topology
        The rounds that end the steps, for as many ranks as the epoch has members.
    algorithm : Algorithm
        The algorithm.
    compression : Compression
        The compression.
    soft_deadline_s : float or None
        How long a step waits for a message.
    members : sequence of int, optional
        The members of the epoch; by default of the first one.
    before : Transport, optional
        The transport of the previous epoch.
    """
    assert isinstance(world, LivingWorld)
    if isinstance(algorithm, Asynchronous):
        averager = before.averager if isinstance(before, PairTransport) else Averager(world, algorithm.history)
        return PairTransport(world, schedule, members=members, averager=averager, max_staleness=algorithm.max_staleness)
    follows_up = (algorithm.compression or compression).follows_up
    return EdgeTransport(world, schedule, members=members, follows_up=follows_up, soft_deadline_s=soft_deadline_s)
