"""Loss and accuracy on the test split."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import gossip
from gossip import World

_BATCH_SIZE = 256
_REPLICA_BATCH_SIZE = 4096
"""The most samples per batch: of one module, and summed over all replicas."""
_OUTPUT_BYTES = 64 * 2**20
"""The most outputs per batch of more than one sample, of all replicas: logits over a vocabulary are large."""


class Evaluation(NamedTuple):
    """Mean cross-entropy in nats and accuracy: the fraction of correct predictions (for text, of next characters)."""

    loss: float
    accuracy: float

    def named(self, name: str) -> dict[str, float]:
        """Return both values as entries of a record, under keys that begin with ``name``."""
        return {f"{name}_loss": self.loss, f"{name}_accuracy": self.accuracy}


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
    """Compute the cross-entropy of logits [..., num_classes] and targets [...], for images and text alike."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, world: World | None = None) -> Evaluation:
    """Evaluate ``module`` in eval mode and restore its previous mode. Local.

    On the ranks of a ``world``, on all of which it is identical, each evaluates its share of the samples: collective.
    """
    if world is not None:
        inputs, targets = (each[world.rank :: world.world_size] for each in (inputs, targets))
    totals = torch.zeros(3, dtype=torch.float64)  # the loss, the correct predictions, all predictions
    with _in_eval_mode(module):
        for logits, some_targets in _batches(module, inputs, targets, _BATCH_SIZE):
            totals[0] += float(cross_entropy(logits, some_targets, reduction="sum"))
            totals[1] += int((logits.argmax(-1) == some_targets).sum())
            totals[2] += some_targets.numel()
    if world is not None:
        world.sum_(totals, "summing the evaluation of the averaged model")
    return _evaluation(totals)


@torch.no_grad()
def evaluate_replicas(workers: gossip.VirtualWorkers, inputs: torch.Tensor, targets: torch.Tensor) -> list[Evaluation]:
    """Evaluate every replica on all samples, all replicas in one batched forward pass. Local."""
    totals = torch.zeros(workers.world_size, 3, dtype=torch.float64)
    most = max(1, _REPLICA_BATCH_SIZE // workers.world_size)
    with _in_eval_mode(workers.module):
        for logits, some_targets in _batches(workers.every, inputs, targets, most):
            expected = some_targets.expand(len(logits), *some_targets.shape)
            losses = cross_entropy(logits, expected, reduction="none").view(len(logits), -1)
            totals[:, 0] += losses.sum(1, dtype=torch.float64)
            totals[:, 1] += (logits.argmax(-1) == expected).flatten(1).sum(1)
            totals[:, 2] += some_targets.numel()
    return [_evaluation(row) for row in totals]


def _batches(
    outputs_of: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor, most: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield outputs and targets in batches of at most ``most`` samples, fewer if a sample's outputs are large."""
    if len(targets) == 0:  # a rank's share of few samples
        return
    size = max(1, min(most, _OUTPUT_BYTES // outputs_of(inputs[:1]).nbytes))
    for some_inputs, some_targets in zip(inputs.split(size), targets.split(size), strict=True):
        yield outputs_of(some_inputs), some_targets


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
