"""The state of a replica and its algorithm: for checkpoints, and for ranks that join."""
