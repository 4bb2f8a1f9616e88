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
from gossip import COMPRESSIONS, AdaptWhileCommunicating, BucketShape, Codec, Compression, Delivery, Uncompressed
from gossip.parameters.buckets import make_buckets

#: Compression ratios of the compressions that work with every topology and keep no state per peer.
COMPRESSION_RATIOS: Mapping[str, float] = {"bf16": 2.0, "int8": 3.99, "int4": 7.97}
_NUM_WARM_UP_STEPS = 3
_NUM_CODED_STEPS = 4

Clock = Callable[[], float]
Loss = Callable[[int], torch.Tensor]
"""``(step) -> Tensor``, which runs the forward pass."""
Optimize = Callable[[Sequence[nn.Parameter]], Optimizer]
"""Makes an optimizer over a list of parameters."""


@dataclass(frozen=True)
class StepTimes:
    """The times of one rank's steps, in seconds, and the sizes of the buckets in launch order.

    ``mix_s`` is the cost that gossip adds: making the messages and mixing in those of one peer; ``coding_s``, by
    compression, what that takes longer than with uncompressed messages.
    """

    forward_s: list[float]
    backward_s: list[float]
    update_s: list[float]
    mix_s: list[float]
    bucket_bytes: tuple[int, ...]
    coding_s: Mapping[str, float]


class PlainSteps:
    """Steps without communication, with the cost of mixing. Local.

    The parameters of the module become views of buckets of ``bucket_cap_mb`` MiB, as under the wrapper.
    """

    def __init__(self, module: nn.Module, loss: Loss, optimizer: Optimize, *, bucket_cap_mb: float) -> None:
        trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        buckets = make_buckets(trained, int(bucket_cap_mb * 2**20))
        self._clock = clock_of(buckets[0].block.device)
        self._bucket_bytes = tuple(bucket.block.nbytes for bucket in buckets)

        def exchanges(compression: Compression) -> list[PretendedExchange]:
            return [PretendedExchange(bucket.block, bucket.shape, compression, self._clock) for bucket in buckets]

        self._exchanges = exchanges(Uncompressed())
        self._compressed = {name: exchanges(COMPRESSIONS.get(name)()) for name in COMPRESSION_RATIOS}
        self._optimizer = optimizer(list(module.parameters()))
        self._loss = loss
        self._num_made = 0

    def make(self) -> tuple[float, float, float, float]:
        """Make one step, and return the times of forward, backward, update and mixing in seconds."""
        step, self._num_made = self._num_made, self._num_made + 1
        clock = [self._clock()]
        value = self._loss(step)
        clock.append(self._clock())
        value.backward()
        clock.append(self._clock())
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.append(self._clock())
        mix_s = sum(exchange.mix_s(step) for exchange in self._exchanges)
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

    def _least_s(self, exchanges: Sequence[PretendedExchange]) -> float:
        """Return the shortest mixing time of a few steps, so that initial compilation and allocation do not count."""
        return min(sum(exchange.mix_s(step) for exchange in exchanges) for step in range(_NUM_CODED_STEPS))


class PretendedExchange:
    """A mock exchange with one peer that measures the training thread's cost; the peer's messages are its own.

    The clock tells the seconds at which all is done that was asked for.
    """

    def __init__(self, block: torch.Tensor, shape: BucketShape, compression: Compression, clock: Clock) -> None:
        self._block, self._clock = block, clock
        self._round = topologies.build("complete", 2).round(0)
        self._codec: Codec = compression.codec(shape, 0)
        self._algorithm = AdaptWhileCommunicating()
        self.num_bytes = 0  # of the newest message

    @torch.no_grad()
    def parts_s(self, step: int) -> tuple[float, float, float]:
        """Return the seconds of encoding, of checking what has arrived beside training, and of decoding and mixing."""
        clock = [self._clock()]
        conversation = self._codec.exchange(self._block, self._round, step)
        clock.append(self._clock())
        arrived = {rank: message.clone() for rank, message in conversation.opening.sent.items()}
        self.num_bytes = sum(message.nbytes for message in arrived.values())
        delivery = Delivery(conversation.opening.sent, arrived)
        clock.append(self._clock())
        for turn in conversation.proceed(delivery):
            for rank, buffer in turn.receive_buffers.items():
                buffer.copy_(turn.sent[rank])
        clock.append(self._clock())
        for part, difference in conversation.arrival.parts:
            torch.linalg.vector_norm(difference)
            self._algorithm.combine_(self._block[part], difference, step)
        clock.append(self._clock())
        return clock[1] - clock[0], clock[3] - clock[2], clock[4] - clock[3]

    def mix_s(self, step: int) -> float:
        """Return the seconds of encoding, decoding and mixing, without work that runs beside training."""
        encode_s, _, decode_s = self.parts_s(step)
        return encode_s + decode_s


def clock_of(device: torch.device) -> Clock:
    """Return a clock that waits until the device has done all that it was given."""
    if device.type == "cpu":
        return time.perf_counter

    def now_s() -> float:
        torch.get_device_module(device.type).synchronize(device)
        return time.perf_counter()

    return now_s
