"""Ranks that go on without those that have died: paths of their own per edge, and agreement on who is left.

Loaded with ``on_peer_loss="continue"`` alone.
"""
