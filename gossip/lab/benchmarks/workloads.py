"""Models of known sizes: with learnable synthetic data for measuring steps, with real data for measuring losses."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from gossip.lab.experiments.datasets import Data, digits, stdlib_text
from gossip.lab.experiments.evaluation import cross_entropy
from gossip.lab.experiments.models import MLP, CharTransformer, SmallCNN
from gossip.lab.experiments.partition import Shards, partition

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets."""

NUM_CLASSES = 10
NUM_BATCHES = 16  # per rank, which cycles through them
_HELD_OUT = 2**31
_MLP_WIDTH = 648  # ten layers of 420,552 parameters each and a head: 16.8 MB, and ten buckets of 1.7 MiB
_NUM_GROUPS = 8
_CONTEXT = 64
_VOCABULARY = 96


class Workload(NamedTuple):
    """A model, a function of a number of samples and a generator that draws a batch, and how it is trained.

    The batch size is that of each rank; the learning rate is for SGD with momentum 0.9.
    """

    make_module: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]
    batch_size: int
    learning_rate: float

    def initial_module(self, seed: int) -> nn.Module:
        """Make the model with its initial values, which are the same on every rank."""
        return _seeded(self.make_module, seed)

    def batches(self, seed: int, rank: int) -> list[Batch]:
        """Draw the training batches of one rank."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + rank)
        return [self.make_batch(self.batch_size, generator) for _ in range(NUM_BATCHES)]

    def held_out(self, seed: int) -> Batch:
        """Draw the held-out batch, which no rank trains on and which is the same on every rank."""
        return self.make_batch(8 * self.batch_size, torch.Generator().manual_seed(_HELD_OUT + seed))


def loss_of(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy, of shape []."""
    inputs, targets = batch
    return cross_entropy(module(inputs), targets)


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def _make_mlp(hidden: Sequence[int]) -> nn.Module:
    module = MLP((_MLP_WIDTH,), NUM_CLASSES, hidden=hidden)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):  # with torch's default initialization, activations vanish over ten layers
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return module


def _draw_vectors(size: int, generator: torch.Generator) -> Batch:
    """Draw vectors of shape [size, 648]: one centre per class, plus normal noise."""
    centres = torch.randn(NUM_CLASSES, _MLP_WIDTH, generator=torch.Generator().manual_seed(0))
    classes = torch.randint(NUM_CLASSES, (size,), generator=generator)
    return 0.5 * centres[classes] + torch.randn(size, _MLP_WIDTH, generator=generator), classes


def _draw_text(size: int, generator: torch.Generator) -> Batch:
    """Draw texts in which the preceding character determines the next one, except for one in ten, which is random."""
    successor = torch.randperm(_VOCABULARY, generator=torch.Generator().manual_seed(0))
    text = torch.randint(_VOCABULARY, (size, _CONTEXT + 1), generator=generator)
    follows = torch.rand(size, _CONTEXT + 1, generator=generator) < 0.9
    for place in range(1, _CONTEXT + 1):
        text[:, place] = torch.where(follows[:, place], successor[text[:, place - 1]], text[:, place])
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _draw_images(size: int, generator: torch.Generator) -> Batch:
    """Draw images of shape [size, 3, 32, 32]: a wave with one direction per class, plus normal noise."""
    classes = torch.randint(NUM_CLASSES, (size,), generator=generator)
    angles = math.pi * classes[:, None, None] / NUM_CLASSES
    places = torch.arange(32.0)
    waves = torch.sin(angles.cos() * places[:, None] + angles.sin() * places)
    return waves[:, None] + torch.randn(size, 3, 32, 32, generator=generator), classes


WORKLOADS = {
    "mlp": Workload(partial(_make_mlp, [_MLP_WIDTH] * 10), _draw_vectors, batch_size=32, learning_rate=0.003),
    "wide_mlp": Workload(partial(_make_mlp, [1078] * 4), _draw_vectors, batch_size=32, learning_rate=0.003),
    "small_mlp": Workload(partial(_make_mlp, [490] * 4), _draw_vectors, batch_size=32, learning_rate=0.003),
    "large_mlp": Workload(partial(_make_mlp, [1500] * 5), _draw_vectors, batch_size=4, learning_rate=0.001),
    "transformer": Workload(
        lambda: CharTransformer((_CONTEXT,), _VOCABULARY, width=320, depth=8),
        _draw_text,
        batch_size=2,
        learning_rate=0.02,
    ),
    "gpt2_small": Workload(
        lambda: CharTransformer((_CONTEXT,), 50257, width=768, depth=12, num_heads=12, tied_head=True),
        _draw_text,
        batch_size=1,
        learning_rate=0.01,
    ),
    "cnn": Workload(
        lambda: SmallCNN((3, 32, 32), NUM_CLASSES, channels=[64, 128, 256, 512]),
        _draw_images,
        batch_size=8,
        learning_rate=0.003,
    ),
}
"""Workloads by name; configs/bench.yaml lists their sizes."""


class LossTask(NamedTuple):
    """Data, a model for them, and a batch size so small that computing is cheap compared with communication."""

    make_data: Callable[[], Data]
    make_module: Callable[[Data], nn.Module]
    batch_size: int
    learning_rate: float

    def initial_module(self, data: Data, seed: int) -> nn.Module:
        """Make the model with its initial values, which are the same on every rank."""
        return _seeded(partial(self.make_module, data), seed)

    def batches(self, data: Data, world_size: int, seed: int, ranks: range) -> Iterator[Batch]:
        """Yield, for each step, the concatenated batches of some ranks from their own classes or modules, forever."""
        indices = partition(data.train_labels, world_size, "by_class", seed=seed)
        shards = Shards(indices, self.batch_size, seed, repeats=True)
        for step in itertools.count():
            samples = shards.batch(ranks, step)
            yield data.train_inputs[samples], data.train_targets[samples]


def _make_cnn(data: Data) -> nn.Module:
    """Make a CNN with group norm: batch-norm statistics of a rank's own classes do not suit the averaged model.

    Source: K. Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020, section 5.
    """
    module = SmallCNN(data.input_shape, data.num_classes, channels=[64, 256, 1024])
    for place, layer in enumerate(module.stages):
        if isinstance(layer, nn.BatchNorm2d):
            module.stages[place] = nn.GroupNorm(_NUM_GROUPS, layer.num_features)
    return module


LOSS_TASKS = {
    "digits_cnn": LossTask(digits, _make_cnn, batch_size=4, learning_rate=0.002),
    "char_transformer": LossTask(
        lambda: stdlib_text(context_length=32, max_bytes=200_000),
        lambda data: CharTransformer(data.input_shape, data.num_classes, width=256, depth=3),
        batch_size=1,
        learning_rate=0.02,
    ),
}
"""A CNN of 10.1 MB on images divided by class, and a transformer of 9.7 MB on source text divided by module."""
