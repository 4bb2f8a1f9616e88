"""Ranks: started on this machine, or by torchrun or SLURM."""
