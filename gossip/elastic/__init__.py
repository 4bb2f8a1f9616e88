"""Who trains: ranks that continue without those that have died, and that others leave, join and rejoin.

Loaded only with ``on_peer_loss="continue"``. ``connections`` has a connection to every other rank;
``membership_consensus`` determines who trains, generation by generation (``generations``), by what ranks propose and
vote in ``membership_protocol``. ``elastic_world`` are these ranks, with ``failure_detector``, collective operations
that are repeated when one is lost (``repeated_operations``), and an ``elastic_flag`` on which they agree while they
train. Those of a ``shard_group_world`` hold a replica together. A ``joining_rank`` is admitted after a rank has given
it its state (``state_transfer``).
"""
