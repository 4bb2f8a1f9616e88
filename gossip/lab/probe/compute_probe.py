"""How long a step takes without communication, part by part, while all ranks compute."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

import topologies
from gossip import AdaptWhileCommunicating, Codec, Delivery, Uncompressed
from gossip.parameters.buckets import Bucket, make_buckets

_NUM_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class StepTimes:
    """One rank's steps, in seconds.

    Attributes
    ----------
    forward_s, backward_s, update_s, mix_s : list of float
        By step. ``mix_s`` is what gossip adds: making the messages and mixing those of one peer in.
    bucket_bytes : tuple of int
        In launch order.
    """

    forward_s: list[float]
    backward_s: list[float]
    update_s: list[float]
    mix_s: list[float]
    bucket_bytes: tuple[int, ...]


class PlainSteps:
    """Steps without communication, with what mixing costs. Local.

    Parameters
    ----------
    module : Module
        Its parameters become views of buckets, as the wrapper's are.
    loss : callable
        ``(step) -> Tensor``: the forward pass.
    optimizer : callable
        Makes one over a list of parameters.
    bucket_cap_mb : float
        As the wrapper's.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[int], torch.Tensor],
        optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
        *,
        bucket_cap_mb: float,
    ) -> None:
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        buckets = make_buckets(trained, int(bucket_cap_mb * 2**20))
        self._device = buckets[0].block.device
        self._bucket_bytes = tuple(bucket.block.nbytes for bucket in buckets)
        self._exchanges = [_PretendedExchange(bucket) for bucket in buckets]
        self._optimizer = optimizer(list(module.parameters()))
        self._loss = loss
        self._num_made = 0

    def make(self) -> tuple[float, float, float, float]:
        """Make one; how long forward, backward, update and mixing took."""
        step, self._num_made = self._num_made, self._num_made + 1
        clock = [_now(self._device)]
        value = self._loss(step)
        clock.append(_now(self._device))
        value.backward()
        clock.append(_now(self._device))
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.append(_now(self._device))
        mix_s = sum(exchange.mix(step) for exchange in self._exchanges)
        forward_s, backward_s, update_s = (end - begin for begin, end in itertools.pairwise(clock))
        return forward_s, backward_s, update_s, mix_s

    def measure(self, num_steps: int) -> StepTimes:
        """Make a few, and then so many that count. Call it on all ranks at once: they may share processors."""
        for _ in range(_NUM_WARM_UP_STEPS):
            self.make()
        forward_s, backward_s, update_s, mix_s = map(list, zip(*(self.make() for _ in range(num_steps)), strict=True))
        return StepTimes(forward_s, backward_s, update_s, mix_s, self._bucket_bytes)


class _PretendedExchange:
    """What an exchange with one peer costs the training thread, with messages that are there already."""

    def __init__(self, bucket: Bucket) -> None:
        self._block = bucket.block
        self._round = topologies.build("complete", 2).round(0)
        self._codec: Codec = Uncompressed().codec(bucket.shape, 0)
        self._algorithm = AdaptWhileCommunicating()
        self._arrived = bucket.block.clone()

    @torch.no_grad()
    def mix(self, step: int) -> float:
        """How long it took in seconds, without what runs beside the training."""
        clock = [_now(self._block.device)]
        conversation = self._codec.exchange(self._block, self._round, step)
        clock.append(_now(self._block.device))
        for _ in conversation.proceed(Delivery(conversation.opening.sent, {1: self._arrived})):
            pass
        clock.append(_now(self._block.device))
        for part, difference in conversation.arrival.parts:
            torch.linalg.vector_norm(difference)
            self._algorithm.combine_(self._block[part], difference, step)
        clock.append(_now(self._block.device))
        return clock[1] - clock[0] + clock[3] - clock[2]


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
    return time.perf_counter()
