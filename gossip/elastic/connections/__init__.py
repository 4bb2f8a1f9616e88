"""Connections to all other ranks, served by one thread: ``mesh`` has a ``peer_connection`` to each of them."""
