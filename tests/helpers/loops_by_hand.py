"""Loops by hand, which those of other libraries are to equal to the bit, and the collectives that these call."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import TensorDataset

from gossip import GossipDataParallel

BATCH_SIZE = 3


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


def samples(num_batches: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Of all ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH_SIZE * num_batches, 4, generator=generator, dtype=dtype)
    return TensorDataset(x, x.sum(1, keepdim=True).sin() + torch.randn(len(x), 1, generator=generator, dtype=dtype))


@dataclass(frozen=True)
class Case:
    """How a model is trained."""

    step_in_backward: bool = True
    clip: float | None = None
    accumulates: int = 1
    half: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.half is None else torch.float32

    @property
    def clipping(self) -> dict[str, Any]:
        """What the wrapper is told of it."""
        return {"clip_grad_norm": self.clip} if self.step_in_backward else {}

    def scaler(self) -> GradScaler:
        """That overflows at first."""
        return GradScaler("cpu", init_scale=2.0**18, growth_interval=3, enabled=self.half is torch.float16)

    def num_steps(self, num_batches: int) -> int:
        return -(-num_batches // self.accumulates)

    def is_step(self, number: int, num_batches: int) -> bool:
        """Whether the batch of this number, from 1 on, is the last one of a step."""
        return number % self.accumulates == 0 or number == num_batches


def train_by_hand(
    case: Case,
    model: GossipDataParallel,
    batches: Sequence[Any],
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    scaler: GradScaler,
    end_step: Callable[[], object] = lambda: None,
) -> list[float]:
    """Train, and return the norms of what was clipped; ``end_step`` is called after each step."""
    norms: list[float] = []
    for number, (x, y) in enumerate(batches, 1):
        is_step = case.is_step(number, len(batches))
        with contextlib.nullcontext() if is_step else model.no_sync():
            scaler.scale(loss_of(x, y) / case.accumulates).backward()
        if not is_step:
            continue
        if case.step_in_backward:
            norms += [] if case.clip is None else [model.grad_norm]
            model.optimizer.step()
        else:
            scaler.unscale_(model.optimizer)
            if case.clip is not None:
                norms.append(float(model.clip_grad_norm_(case.clip)))
            scaler.step(model.optimizer)
            scaler.update()
            model.optimizer.zero_grad()
        end_step()
    return norms


COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "reduce"),
)


@contextlib.contextmanager
def collectives_counted(called: list[str]) -> Iterator[list[str]]:
    """Within the block the names of the default group's collectives of torch.distributed are added to ``called``."""

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") in (None, dist.group.WORLD):
                called.append(name)
            return function(*args, **kwargs)

        return count

    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, counting(name)))
        yield called
