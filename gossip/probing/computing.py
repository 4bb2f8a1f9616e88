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
from gossip.algorithms import AdaptWhileCommunicating
from gossip.buckets import Bucket, make_buckets
from gossip.compression.codec import Codec
from gossip.compression.values import Uncompressed

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


def measure_steps(
    module: nn.Module,
    loss: Callable[[int], torch.Tensor],
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer],
    *,
    num_steps: int,
    bucket_cap_mb: float,
) -> StepTimes:
    """Make plain steps and take their times. Local; call it on all ranks at once, for they may share processors.

    Parameters
    ----------
    module : Module
        Its parameters become views of buckets, as the wrapper's are.
    loss : callable
        ``(step) -> Tensor``: the forward pass.
    optimizer : callable
        Makes one over a list of parameters.
    num_steps : int
        That are measured, after a few that are not.
    bucket_cap_mb : float
        As the wrapper's.
    """
    buckets = make_buckets(module.named_parameters(), int(bucket_cap_mb * 2**20))
    device = buckets[0].block.device
    exchanges = [_PretendedExchange(bucket) for bucket in buckets]
    updating = optimizer(list(module.parameters()))
    times: list[tuple[float, ...]] = []
    for step in range(_NUM_WARM_UP_STEPS + num_steps):
        clock = [_now(device)]
        value = loss(step)
        clock.append(_now(device))
        value.backward()
        clock.append(_now(device))
        updating.step()
        updating.zero_grad()
        clock.append(_now(device))
        for exchange in exchanges:
            exchange.mix(step)
        clock.append(_now(device))
        times.append(tuple(end - begin for begin, end in itertools.pairwise(clock)))
    forward_s, backward_s, update_s, mix_s = map(list, zip(*times[_NUM_WARM_UP_STEPS:], strict=True))
    return StepTimes(forward_s, backward_s, update_s, mix_s, tuple(bucket.block.nbytes for bucket in buckets))


class _PretendedExchange:
    """What an exchange with one peer costs the training thread, with messages that are there already."""

    def __init__(self, bucket: Bucket) -> None:
        self._block = bucket.block
        self._round = topologies.build("complete", 2).round(0)
        self._codec: Codec = Uncompressed().codec(bucket.shape, 0)
        self._algorithm = AdaptWhileCommunicating()
        self._arrived = bucket.block.clone()

    @torch.no_grad()
    def mix(self, step: int) -> None:
        self._codec.encode(self._block, self._round, step)
        for part, difference in self._codec.decode({1: self._arrived}):
            torch.linalg.vector_norm(difference)
            self._algorithm.combine_(self._block[part], difference, step)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
    return time.perf_counter()
