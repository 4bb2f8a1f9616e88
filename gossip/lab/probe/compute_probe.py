"""Measurement of the parts of a step without communication, while all ranks compute."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

import topologies
from gossip import COMPRESSIONS, AdaptWhileCommunicating, Codec, Compression, Delivery, Uncompressed
from gossip.parameters.buckets import Bucket, make_buckets

#: Compression ratios of the compressions that work with every topology and keep no state per peer.
COMPRESSION_RATIOS: Mapping[str, float] = {"bf16": 2.0, "int8": 3.99, "int4": 7.97}
_NUM_WARM_UP_STEPS = 3
_NUM_CODED_STEPS = 4


@dataclass(frozen=True)
class StepTimes:
    """The times of one rank's steps, in seconds.

    Attributes
    ----------
    forward_s, backward_s, update_s, mix_s : list of float
        The times of each step. ``mix_s`` is the cost that gossip adds: making the messages and mixing in those of one
        peer.
    bucket_bytes : tuple of int
        The sizes of the buckets in launch order.
    coding_s : mapping of str to float
        By compression, the additional time to encode and mix the messages of a step compared with uncompressed ones.
    """

    forward_s: list[float]
    backward_s: list[float]
    update_s: list[float]
    mix_s: list[float]
    bucket_bytes: tuple[int, ...]
    coding_s: Mapping[str, float]


class PlainSteps:
    """Steps without communication, with the cost of mixing. Local.

    Parameters
    ----------
    module : Module
        The module to train. Its parameters become views of buckets, as under the wrapper.
    loss : callable
        A function ``(step) -> Tensor`` that runs the forward pass.
    optimizer : callable
        A function that makes an optimizer over a list of parameters.
    bucket_cap_mb : float
        The bucket size in MiB, as for the wrapper.
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
        self._exchanges = [_PretendedExchange(bucket, Uncompressed()) for bucket in buckets]
        self._compressed = {
            name: [_PretendedExchange(bucket, COMPRESSIONS.get(name)()) for bucket in buckets]
            for name in COMPRESSION_RATIOS
        }
        self._optimizer = optimizer(list(module.parameters()))
        self._loss = loss
        self._num_made = 0

    def make(self) -> tuple[float, float, float, float]:
        """Make one step, and return the times of forward, backward, update and mixing in seconds."""
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
        """Warm up and measure steps. Call it on all ranks at the same time, because ranks may share processors."""
        for _ in range(_NUM_WARM_UP_STEPS):
            self.make()
        forward_s, backward_s, update_s, mix_s = map(list, zip(*(self.make() for _ in range(num_steps)), strict=True))
        coding_s = {
            name: max(0.0, self._least_s(exchanges) - self._least_s(self._exchanges))
            for name, exchanges in self._compressed.items()
        }
        self._compressed.clear()
        return StepTimes(forward_s, backward_s, update_s, mix_s, self._bucket_bytes, coding_s)

    def _least_s(self, exchanges: Sequence[_PretendedExchange]) -> float:
        """Return the shortest mixing time of a few steps, so that initial compilation and allocation do not count."""
        return min(sum(exchange.mix(step) for exchange in exchanges) for step in range(_NUM_CODED_STEPS))


class _PretendedExchange:
    """A mock exchange with one peer that measures the training thread's cost; the peer's messages are its own."""

    def __init__(self, bucket: Bucket, compression: Compression) -> None:
        self._block = bucket.block
        self._round = topologies.build("complete", 2).round(0)
        self._codec: Codec = compression.codec(bucket.shape, 0)
        self._algorithm = AdaptWhileCommunicating()

    @torch.no_grad()
    def mix(self, step: int) -> float:
        """Exchange and mix, and return the time in seconds, without work that runs in parallel with training."""
        clock = [_now(self._block.device)]
        conversation = self._codec.exchange(self._block, self._round, step)
        clock.append(_now(self._block.device))
        arrived = {rank: message.clone() for rank, message in conversation.opening.sent.items()}
        for turn in conversation.proceed(Delivery(conversation.opening.sent, arrived)):
            for rank, buffer in turn.receive_buffers.items():
                buffer.copy_(turn.sent[rank])
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
