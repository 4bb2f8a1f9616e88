"""How messages get from rank to rank: who takes part, over which communicators, and how long anybody waits.

From the outside in: ``transports`` carry a round's messages, in ``shared_memory`` (and its ``shared_buffers``) where
both ends are on one machine, and ``debug_transport`` checks each; ``world`` has the few collectives over all ranks, and
``flags`` one that nobody waits for; ``device_paths`` knows how each device's tensors reach a communicator,
``worker_threads`` sends in the back, and ``daemon_threads`` ends whatever runs there before the program does;
``membership`` says who takes part, and ``roll_call`` who is absent.
"""
