"""Seconds and bytes until a method's averaged model is as good as all-reduce's, on links that cost what they cost.

One run measures all methods in the same processes, one after the other: see configs/time_to_loss.yaml.
"""
