"""Measurement of a cluster's compute per step, jitter, latency and bandwidth, and advice that follows from them."""
