"""Step time, bytes and memory of gossip compared with all-reduce and other libraries, on links of realistic speed.

One run measures all methods in the same processes, in alternating order; see configs/bench.yaml.
"""
