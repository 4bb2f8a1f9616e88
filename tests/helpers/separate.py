"""What virtual workers must equal: plain modules with an optimizer each, mixed by the matrices of a topology."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from small_runs import TINY_BUCKETS as TINY_BUCKETS
from small_runs import make_module as make_module
from small_runs import optimizers_of
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import topologies
from gossip import VirtualWorkers
from gossip.checkpoints.virtual_replicas import VirtualReplicas
from topologies import Topology

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""(model, its samples) -> the mean over them of what is minimised."""


def mean_square(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


def batch(num_samples: int, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, *(shape or (3,)), generator=generator, dtype=torch.float64)


class Separate:
    """Replicas apart."""

    def __init__(
        self,
        module: nn.Module,
        world_size: int,
        optimizer: Any = SGD,
        topology: str | Topology = "one_peer_exponential",
        *,
        combines_first: bool = False,
        clip: Callable[[nn.Module], object] = lambda _: None,
    ) -> None:
        self.modules = [copy.deepcopy(module) for _ in range(world_size)]
        made = [optimizer(list(each.named_parameters())) for each in self.modules]
        self.optimizers = [each if isinstance(each, tuple) else (each,) for each in made]
        self.topology = topologies.build(topology, world_size) if isinstance(topology, str) else topology
        self.step = 0
        self._trained: set[int] = set()  # what has required no gradient so far is not exchanged
        self._combines_first = combines_first
        self._clip = clip

    def train(self, inputs: torch.Tensor, loss: Loss = mean_square) -> None:
        """One step; the samples are dealt to the replicas."""
        self.backward(inputs, loss)
        self.update(range(len(self.modules)))

    def backward(self, inputs: torch.Tensor, loss: Loss = mean_square) -> None:
        for module, own in zip(self.modules, inputs.tensor_split(len(self.modules)), strict=True):
            if len(own):
                loss(module, own).backward()

    def update(self, ranks: Sequence[int]) -> None:
        """Mix; update the replicas of some ranks."""
        if self.step and not self._combines_first:
            self._mix(self.step - 1)
        for rank in ranks:
            self._clip(self.modules[rank])
            for optimizer in self.optimizers[rank]:
                optimizer.step()
        for number, parameter in enumerate(self.modules[0].parameters()):
            if parameter.requires_grad:
                self._trained.add(number)
        if self._combines_first:
            self._mix(self.step)
        for module in self.modules:
            module.zero_grad()
        self.step += 1

    @torch.no_grad()
    def _mix(self, step: int) -> None:
        matrix = torch.from_numpy(self.topology.round(step).matrix())
        for number, each in enumerate(zip(*(module.parameters() for module in self.modules), strict=True)):
            if number not in self._trained:
                continue
            mixed = torch.tensordot(matrix, torch.stack(each).double(), 1)
            for parameter, values in zip(each, mixed, strict=True):
                parameter.copy_(values)


def make_workers(
    module: nn.Module, world_size: int, optimizer: Any = SGD, topology: Any = "one_peer_exponential", **arguments: Any
) -> VirtualWorkers:
    chosen = {"devices": ["cpu"], "bucket_cap_mb": TINY_BUCKETS} | arguments
    return VirtualWorkers(copy.deepcopy(module), world_size, optimizer, topology, **chosen)


def train(workers: VirtualWorkers, inputs: torch.Tensor, loss: Loss = mean_square) -> None:
    loss(workers, inputs).backward()


def train_both(workers: VirtualWorkers, separate: Separate, inputs: torch.Tensor, loss: Loss = mean_square) -> None:
    train(workers, inputs, loss)
    separate.train(inputs, loss)


def trained_alike(
    module: nn.Module,
    world_size: int = 3,
    optimizer: Any = SGD,
    topology: Any = "one_peer_exponential",
    *,
    inputs: Callable[[int], torch.Tensor] = lambda step: batch(7, seed=step),
    loss: Loss = mean_square,
    num_steps: int = 3,
    atol: float = 1e-12,
    combines_first: bool = False,
    clip_separate: Callable[[nn.Module], object] = lambda _: None,
    **arguments: Any,
) -> VirtualWorkers:
    """Virtual workers whose replicas have been trained as modules apart have, on what ``inputs`` gives for a step.

    A scheduler drives every optimizer.
    """
    workers = make_workers(module, world_size, optimizer, topology, **arguments)
    separate = Separate(module, world_size, optimizer, topology, combines_first=combines_first, clip=clip_separate)
    optimizers = itertools.chain(optimizers_of(workers), *separate.optimizers)
    schedulers = [ExponentialLR(each, 0.9) for each in optimizers]
    for step in range(num_steps):
        train_both(workers, separate, inputs(step), loss)
        for scheduler in schedulers:
            scheduler.step()
    assert workers.step == num_steps
    assert_same(workers, separate, atol)
    return workers


def assert_same(workers: VirtualWorkers, separate: Separate, atol: float = 1e-12) -> None:
    for rank, module in enumerate(separate.modules):
        replica = workers.replica(rank).state_dict()
        assert replica.keys() == module.state_dict().keys()
        for name, values in module.state_dict().items():
            torch.testing.assert_close(
                replica[name],
                values,
                rtol=atol,
                atol=atol,
                msg=lambda text, name=name, rank=rank: f"{rank} {name} {text}",
            )


def stacked(workers: VirtualWorkers) -> dict[str, torch.Tensor]:
    """Copies of the parameters of all replicas, [n, *shape]."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, stack in workers.named_parameters():
        stacks.setdefault(name, []).append(stack.detach().cpu())
    return {name: torch.cat(by_device) for name, by_device in stacks.items()}


def everything(workers: VirtualWorkers) -> list[dict[str, Any]]:
    """What a checkpoint would have of each rank."""
    return list(VirtualReplicas(workers).states())
