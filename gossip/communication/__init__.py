"""Communication between ranks: who takes part, over which communicators, and how long a wait may last.

From the outside in: ``transports`` carry a round's messages, in ``shared_memory`` (and its ``shared_buffers``) where
both ends are on one machine, and ``debug_transport`` checks each message; ``world`` has the few collectives over all
ranks, and ``flags`` one that does not block; ``device_paths`` knows how each device's tensors reach a communicator,
``worker_threads`` sends in the background, and ``daemon_threads`` ends background threads before the program ends;
``membership`` says who takes part, and ``roll_call`` who is absent.
"""
