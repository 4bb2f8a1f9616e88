"""Benchmarks of gossip, all-reduce and other libraries, all methods in the same processes, on links of realistic speed.

:mod:`.benchmark` says what a benchmark is, :mod:`.harness` runs one.
"""
