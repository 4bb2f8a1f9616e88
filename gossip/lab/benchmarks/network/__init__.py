"""The network on which the ranks of a benchmark run: emulated hosts and links, and what they carry."""
