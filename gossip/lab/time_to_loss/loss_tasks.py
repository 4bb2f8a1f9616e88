"""The training tasks: two models of about 10 MB on real data that differs between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gossip.lab.benchmarks.bench_models import Batch
from gossip.lab.experiments.datasets import Data, digits, stdlib_text
from gossip.lab.experiments.models import CharTransformer, SmallCNN
from gossip.lab.experiments.partition import partition
from gossip.lab.experiments.sample_batches import Shards


@dataclass(frozen=True)
class LossTask:
    """A model, its data, and its batch size, which is small so that computing is cheap compared with communication.

    Attributes
    ----------
    make_data : callable
        A function that loads the data.
    make_module : callable
        A function that makes the model for the data.
    batch_size : int
        The number of samples per rank and step.
    learning_rate : float
        The learning rate of SGD with momentum 0.9.
    """

    make_data: Callable[[], Data]
    make_module: Callable[[Data], nn.Module]
    batch_size: int
    learning_rate: float

    def initial_module(self, data: Data, seed: int) -> nn.Module:
        """Make the model with its initial values, which are the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_module(data)

    def batches(self, data: Data, world_size: int, seed: int, ranks: range) -> Iterator[Batch]:
        """Yield, for each step, the concatenated batches of some ranks from their own classes or modules, forever."""
        indices = partition(data.train_labels, world_size, "by_class", seed=seed)
        shards = Shards(indices, self.batch_size, seed, repeats=True)
        for epoch in itertools.count():
            yield from shards.batches(data.train_inputs, data.train_targets, ranks=ranks, epoch=epoch)


_NUM_GROUPS = 8


def _make_cnn(data: Data) -> nn.Module:
    """Make a CNN with group norm: batch-norm statistics of a rank's own classes do not suit the averaged model.

    Source: K. Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020, section 5.
    """
    module = SmallCNN(data.input_shape, data.num_classes, channels=[64, 256, 1024])
    for place, layer in enumerate(module.stages):
        if isinstance(layer, nn.BatchNorm2d):
            module.stages[place] = nn.GroupNorm(_NUM_GROUPS, layer.num_features)
    return module


TASKS = {
    "digits_cnn": LossTask(
        digits,
        _make_cnn,
        batch_size=4,
        learning_rate=0.002,
    ),
    "char_transformer": LossTask(
        lambda: stdlib_text(context_length=32, max_bytes=200_000),
        lambda data: CharTransformer(data.input_shape, data.num_classes, width=256, depth=3),
        batch_size=1,
        learning_rate=0.02,
    ),
}
"""A CNN of 10.1 MB on images divided by class, and a transformer of 9.7 MB on source text divided by module."""
