"""What is exchanged, and how: a model's messages in flight, and the transports that carry them.

``rank_exchanges`` launches and mixes in the messages of a rank (``messages_in_flight``) by a ``transport``: in groups
or from peer to peer (``distributed_transport``), with a check of each message (``debug_transport``), over a separate
connection for every edge (``edge_transport``, ``late_messages``), or as averages of pairs (``pair_averaging``).
``outlier_detection`` finds ranks whose values are wrong, and ``clipping`` bounds what they do.
"""
