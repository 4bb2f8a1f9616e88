"""Loss and accuracy on the test split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import gossip
from gossip import World

_BATCH_SIZE = 256
_REPLICA_BATCH_SIZE = 4096
"""Samples per batch, summed over all replicas; bounded because logits over a vocabulary are large."""


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats and accuracy: the fraction of correct predictions (for text, of next characters)."""

    loss: float
    accuracy: float

    def named(self, name: str) -> dict[str, float]:
        """Return both values as entries of a record, under keys that begin with ``name``."""
        return {f"{name}_loss": self.loss, f"{name}_accuracy": self.accuracy}


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
    """Compute the cross-entropy of logits [..., num_classes] and targets [...], for images and text alike."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def evaluate(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Evaluation:
    """Evaluate ``module`` in eval mode and restore its previous mode. Local."""
    return _evaluation(_totals(module, inputs, targets))


def evaluate_together(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, world: World) -> Evaluation:
    """Evaluate a module that is identical on all ranks; each rank evaluates its share of the samples. Collective."""
    totals = _totals(module, inputs[world.rank :: world.world_size], targets[world.rank :: world.world_size])
    world.sum_(totals, "summing the evaluation of the averaged model")
    return _evaluation(totals)


@torch.no_grad()
def evaluate_replicas(workers: gossip.VirtualWorkers, inputs: torch.Tensor, targets: torch.Tensor) -> list[Evaluation]:
    """Evaluate every replica on all samples, all replicas in one batched forward pass. Local."""
    totals = torch.zeros(workers.world_size, 3, dtype=torch.float64)
    size = max(1, _REPLICA_BATCH_SIZE // workers.world_size)
    with _in_eval_mode(workers.module):
        for some_inputs, some_targets in zip(inputs.split(size), targets.split(size), strict=True):
            logits = workers.every(some_inputs)
            expected = some_targets.expand(len(logits), *some_targets.shape)
            losses = cross_entropy(logits, expected, reduction="none").view(len(logits), -1)
            totals[:, 0] += losses.sum(1, dtype=torch.float64)
            totals[:, 1] += (logits.argmax(-1) == expected).flatten(1).sum(1)
            totals[:, 2] += some_targets.numel()
    return [_evaluation(row) for row in totals]


@torch.no_grad()
def _totals(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed loss, the number of correct predictions and the number of predictions: float64 [3]."""
    totals = torch.zeros(3, dtype=torch.float64)
    with _in_eval_mode(module):
        for some_inputs, some_targets in zip(inputs.split(_BATCH_SIZE), targets.split(_BATCH_SIZE), strict=True):
            if some_targets.numel() > 0:
                logits = module(some_inputs)
                totals[0] += float(cross_entropy(logits, some_targets, reduction="sum"))
                totals[1] += int((logits.argmax(-1) == some_targets).sum())
                totals[2] += some_targets.numel()
    return totals


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def _evaluation(totals: torch.Tensor) -> Evaluation:
    loss, right, count = totals.tolist()
    return Evaluation(loss / count, right / count)
