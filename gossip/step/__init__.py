"""Steps: from a backward pass, or a call of ``optimizer.step()``, to the messages that are sent."""
