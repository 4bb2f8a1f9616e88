"""Seconds and bytes until a method's averaged model is as good as all-reduce's, on links of realistic speed.

One run measures all methods in the same processes, one after another; see configs/time_to_loss.yaml.
"""
