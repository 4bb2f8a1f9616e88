"""Gossip in the training loops of other libraries: one module per library, which must be installed.

``accelerate`` has ``prepare``, ``transformers`` has ``GossipTrainer``, and ``lightning`` has the strategies of
Lightning's Trainer and Fabric. Nothing else in gossip imports these modules.
"""
