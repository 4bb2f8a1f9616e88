"""Step time, bytes and memory of gossip against all-reduce and other libraries, on links that cost what they cost.

One run measures all methods in the same processes, in alternating order: see configs/bench.yaml.
"""
