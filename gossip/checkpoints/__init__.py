"""Checkpoints that survive a crash and resume bit for bit, and the averaged model as one file."""

from gossip.checkpoints.exporting import export as export
from gossip.checkpoints.loading import Checkpoint as Checkpoint
from gossip.checkpoints.loading import load as load
from gossip.checkpoints.saving import save as save

__all__ = ["Checkpoint", "export", "load", "save"]
