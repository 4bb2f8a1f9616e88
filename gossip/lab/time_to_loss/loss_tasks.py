"""What is learned: two models of about 10 MB on real data, which every rank has others of."""

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
    """A model, its data, and how small a step is: computing must be cheap beside sending the model.

    Attributes
    ----------
    make_data : callable
    make_module : callable
        Makes the model for the data.
    batch_size : int
        Per rank and step.
    learning_rate : float
        For SGD with momentum 0.9.
    """

    make_data: Callable[[], Data]
    make_module: Callable[[Data], nn.Module]
    batch_size: int
    learning_rate: float

    def initial_module(self, data: Data, seed: int) -> nn.Module:
        """The model before the first step, the same on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_module(data)

    def batches(self, data: Data, world_size: int, seed: int, ranks: range) -> Iterator[Batch]:
        """For each step the batches of some ranks, one after the other: of their own classes or modules, forever."""
        indices = partition(data.train_labels, world_size, "by_class", seed=seed)
        shards = Shards(indices, self.batch_size, seed, repeats=True)
        for epoch in itertools.count():
            yield from shards.batches(data.train_inputs, data.train_targets, ranks=ranks, epoch=epoch)


_NUM_GROUPS = 8


def _make_cnn(data: Data) -> nn.Module:
    """With group norm: a batch norm's statistics are of a rank's own classes, and the mean model has no use for them.

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
"""CNN of 10.1 MB on images by class; transformer of 9.7 MB on source text by module."""
