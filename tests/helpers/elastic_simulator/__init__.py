"""Deterministic simulation of ranks that continue without lost ones: the library's own code, and a seed.

``virtual_time`` and ``virtual_network`` replace threads, clocks, sockets and the store; ``simulated_ranks`` train with
values whose sums are exact; ``fault_schedules`` are drawn from seeds; ``invariants`` are checked after every event.
"""
