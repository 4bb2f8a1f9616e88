"""The version of the distribution ``gossip-training``."""

__version__ = "0.1.0"
