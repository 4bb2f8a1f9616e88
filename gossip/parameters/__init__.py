"""The place of a model's parameters and buffers in memory, their comparison between ranks, and their average."""
