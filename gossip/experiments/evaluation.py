"""Loss and accuracy on the test split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from gossip.communication.world import World

_BATCH_SIZE = 256


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats, and the part of the predictions that is right (for text: of the next characters)."""

    loss: float
    accuracy: float

    def named(self, name: str) -> dict[str, float]:
        """For a record, whose keys begin with ``name``."""
        return {f"{name}_loss": self.loss, f"{name}_accuracy": self.accuracy}


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
    """Of logits [..., num_classes] and targets [...]: images and text alike."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def evaluate(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Evaluation:
    """Evaluate ``module`` in eval mode; its mode is put back. Local."""
    return _evaluation(_totals(module, inputs, targets))


def evaluate_together(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, world: World) -> Evaluation:
    """Evaluate a module that is the same on all ranks, each rank on its part of the samples. Collective."""
    totals = _totals(module, inputs[world.rank :: world.world_size], targets[world.rank :: world.world_size])
    world.sum_(totals, "summing the evaluation of the averaged model")
    return _evaluation(totals)


@torch.no_grad()
def _totals(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed loss, right predictions, all predictions: float64 [3]."""
    was_training = module.training
    module.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    try:
        for some_inputs, some_targets in zip(inputs.split(_BATCH_SIZE), targets.split(_BATCH_SIZE), strict=True):
            if some_targets.numel() == 0:
                continue
            logits = module(some_inputs)
            totals[0] += float(cross_entropy(logits, some_targets, reduction="sum"))
            totals[1] += int((logits.argmax(-1) == some_targets).sum())
            totals[2] += some_targets.numel()
    finally:
        module.train(was_training)
    return totals


def _evaluation(totals: torch.Tensor) -> Evaluation:
    loss, right, count = totals.tolist()
    return Evaluation(loss / count, right / count)
