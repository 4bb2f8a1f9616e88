"""Fault injection at named places of a training that survives lost ranks, for tests and ``scripts/chaos.py``."""
