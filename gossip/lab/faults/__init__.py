"""Faults at named places of a training that goes on without those that are lost, for tests and ``scripts/chaos.py``."""
