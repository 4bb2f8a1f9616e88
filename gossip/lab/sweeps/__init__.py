"""Sweeps: many runs at once, with their selection, their folders and the comparison of their results."""
