"""Where a model's parameters and buffers lie, how they are compared between ranks, and their average."""
