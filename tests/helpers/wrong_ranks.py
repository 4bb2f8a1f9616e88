"""Ranks that train on handwritten digits, one of which becomes wrong without ceasing to be finite."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from listening import logged
from sklearn.datasets import load_digits
from small_runs import finish
from torch import nn

from gossip import GossipDataParallel

NUM_TRAINED = 1500
WRONG = 2
WAITS_AT = 120
"""The step from which the others only mix, and train no further, until a rank that left has come back."""


class Course(NamedTuple):
    """What a rank tells in the end: warnings; ``stats().unusual_by_peer`` by step; its loss over all training data;
    and the accuracy of the averaged model, on the held-out digits, in percent.
    """

    warnings: list[str]
    unusual: list[Counter[int]]
    loss: float
    accuracy: float

    def first(self, rank: int) -> int | None:
        """Return the first step that counts something unusual of a rank."""
        return next((step for step, counted in enumerate(self.unusual) if counted[rank]), None)


@lru_cache(maxsize=1)
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.as_tensor(images, dtype=torch.float32)[order] / 16, torch.as_tensor(labels)[order]


def multilayer_perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Stuck(torch.optim.SGD):
    """From some step on, the values of the wrong rank do not change any more."""

    def __init__(self, parameters: Any, lr: float, since: int) -> None:
        super().__init__(parameters, lr=lr)
        self.num_left = since if torch.distributed.get_rank() == WRONG else sys.maxsize

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.num_left -= 1
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.num_left == 0:
            self.kept = [parameter.detach().clone() for parameter in parameters]
        elif self.num_left < 0:
            for parameter, kept in zip(parameters, self.kept, strict=True):
                parameter.copy_(kept)


@torch.no_grad()
def scale(model: GossipDataParallel) -> None:
    """Multiply all values by 1000."""
    for parameter in model.module.parameters():
        parameter.mul_(1000)


@torch.no_grad()
def randomise(model: GossipDataParallel) -> None:
    """Draw all values anew."""
    for parameter in model.module.parameters():
        parameter.normal_(generator=torch.Generator().manual_seed(7))


def train(
    num_steps: int,
    fault: Callable[[GossipDataParallel], None] | None,
    fault_at: int,
    options: Mapping[str, Any],
    make_module: Callable[[], nn.Module] = multilayer_perceptron,
) -> Course:
    """Train, and make the fault once, on rank ``WRONG``, before step ``fault_at``."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    images, labels = digits()
    own = torch.arange(rank, NUM_TRAINED, size)
    generator = torch.Generator().manual_seed(rank)
    unusual: list[Counter[int]] = []
    chosen: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)}
    chosen |= options
    schedule = chosen.pop("schedule", None)
    with logged() as warnings, GossipDataParallel(make_module(), **chosen) as model:
        scheduler = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(model.optimizer, schedule)
        end, expected = num_steps, 0
        while model.step < end:
            if model.step > expected:  # this rank has come back: so long have the others waited
                end += max(0, model.step - WAITS_AT)
            expected = model.step + 1
            if model.step >= WAITS_AT and model.world_size < size:
                model.idle_step()
                end += 1
                continue
            if model.step == fault_at and rank == WRONG and fault is not None:
                fault(model)
            batch = own[torch.randint(len(own), (32,), generator=generator)]
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            finish(model)
            if scheduler is not None:
                scheduler.step()
            unusual.append(Counter(model.stats().unusual_by_peer))
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(images[:NUM_TRAINED]), labels[:NUM_TRAINED]))
        with model.averaged(), torch.no_grad():
            is_right = model(images[NUM_TRAINED:]).argmax(1) == labels[NUM_TRAINED:]
            accuracy = 100 * float(is_right.float().mean())
    return Course(warnings, unusual, loss, accuracy)
