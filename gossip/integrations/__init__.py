"""Trainers of other libraries that train by gossip: one module for each, which needs that library installed.

``accelerate`` has ``prepare``, ``transformers`` has ``GossipTrainer``, and ``lightning`` the strategies of Lightning's
Trainer and Fabric. Nothing else of gossip imports them.
"""
