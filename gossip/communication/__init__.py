"""The group of ranks: its communicators, the few collectives over all of them, and waits that name who is absent.

``membership`` says who takes part, over which backends; ``world`` has the collectives: ``staged_collectives`` assign
nothing before every rank has it, ``flags`` never block, and ``row_collectives`` are begun at one time and awaited at
another. ``device_paths`` knows how each device's tensors reach a communicator, ``shared_memory`` (with its
``shared_buffers``) carries messages on one machine, and ``waiting`` bounds every wait.
"""
