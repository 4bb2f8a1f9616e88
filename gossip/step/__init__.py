"""When a step is made: from a backward pass, or a call of ``optimizer.step()``, to the messages that are sent.

``building`` constructs a model's parts from the wrapper's arguments. ``backward_pass`` says that gradients are
complete; ``step_kinds`` then make the step (``engine``), in the ``step_order`` of a bucket:
``local_update``, what has arrived, what is sent. ``forward_waits`` holds back the modules that need it.
``generation_change`` takes the parts to other ranks, and ``state`` reads and restores them.
"""
