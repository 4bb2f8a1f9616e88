"""Replicas that are sharded over a group of ranks: each group is one gossip worker, and each of its ranks one shard."""
