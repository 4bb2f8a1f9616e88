"""How a step is made: from a backward pass, or a call of ``optimizer.step()``, to messages on their way."""
