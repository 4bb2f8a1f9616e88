"""Decentralized data-parallel training for PyTorch."""
