"""How fast compressions encode and decode one bucket, next to a copy of it.

    python scripts/compression_speed.py
    python scripts/compression_speed.py --device cuda --numel 67108864

Two ranks exchange in one thread of one process. GB/s are of the values (4 bytes each) per second of the thread's own
time on a CPU, of the device's time elsewhere. Decode contains checking the message, and mixing the result into the
values.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import topologies
from gossip import AdaptWhileCommunicating, BucketShape, Conversation, Delivery
from gossip.compression.compression_names import COMPRESSIONS, resolve_compression

NUM_WARM_UP = 3
NOT_BY_VECTOR = ("powergossip",)  # its bytes depend on the matrices


class Clock:
    """Adds up what a device takes for pieces of work."""

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        self._pieces: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], Any], *, goes_on: bool = False) -> Any:
        """What it returns; notes how long it took, as a piece of its own or as more of the one before."""
        if self._is_cpu:
            start = time.thread_time()
            result = work()
            took = time.thread_time() - start
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = work()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3
        pieces = self._pieces.setdefault(name, [])
        if goes_on:
            pieces[-1] += took
        else:
            pieces.append(took)
        return result

    def medians(self) -> dict[str, float]:
        """Seconds, without the first few."""
        return {name: statistics.median(times[NUM_WARM_UP:]) for name, times in self._pieces.items()}


def measure(name: str | None, numel: int, device: torch.device, repetitions: int) -> tuple[dict[str, float], float]:
    """Seconds to encode and to decode; bytes per value of the newest message."""
    compression = resolve_compression(name)
    topology = topologies.build("complete", 2)
    round_ = topology.round(0)
    torch.manual_seed(0)
    values = [torch.randn(numel).to(device)] * 2
    values = [replica + 0.01 * torch.randn(numel).to(device) for replica in values]
    codecs = [compression.codec(BucketShape(0, replica), rank) for rank, replica in enumerate(values)]
    algorithm = AdaptWhileCommunicating()
    clock = Clock(device)
    num_bytes = 0

    def mix(conversation: Conversation, into: torch.Tensor) -> None:
        for part, difference in conversation.arrival.parts:
            algorithm.combine_(into[part], difference, 0)

    names = [f"decode by rank {rank}" for rank in range(2)]
    for step in range(NUM_WARM_UP + repetitions):
        conversations: list[Conversation] = [
            clock.time("encode", partial(codec.exchange, replica, round_, step))
            for codec, replica in zip(codecs, values, strict=True)
        ]
        openings = [conversation.opening for conversation in conversations]
        num_bytes = openings[0].sent[1].nbytes
        deliveries = []
        for rank, opening in enumerate(openings):
            opening.receive_buffers[1 - rank].copy_(openings[1 - rank].sent[rank])
            deliveries.append(Delivery(opening.sent, opening.receive_buffers))
            _ = deliveries[rank].on_host if compression.follows_up else None  # a transport's work
        under_way = [
            conversation.proceed(delivery) for conversation, delivery in zip(conversations, deliveries, strict=True)
        ]
        for name in names:
            clock.time(name, lambda: None)
        while (
            turns := [
                clock.time(name, partial(next, more, None), goes_on=True)
                for name, more in zip(names, under_way, strict=True)
            ]
        ) != [None, None]:
            for rank, turn in enumerate(turns):
                for source, buffer in turn.receive_buffers.items():
                    buffer.copy_(turns[source].sent[rank])
        for name, conversation, replica in zip(names, conversations, values, strict=True):
            clock.time(name, partial(mix, conversation, replica), goes_on=True)
        values[0].add_(1e-3)
    return clock.medians(), num_bytes / numel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=4_200_000, help="values in the bucket")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.numel < 1 or arguments.repetitions < 1:
        parser.error("--numel and --repetitions must be at least 1")
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    source = torch.randn(arguments.numel).to(device)
    target = torch.empty_like(source)
    clock = Clock(device)
    for _ in range(NUM_WARM_UP + arguments.repetitions):
        clock.time("copy", lambda: target.copy_(source))
    copy_s = clock.medians()["copy"]
    print(
        f"{arguments.numel} float32 on {device}, torch {torch.__version__}; a copy: {_speed(arguments.numel, copy_s)}\n"
    )
    print("| compression | bytes per value | encode | decode and mix |\n| --- | ---: | ---: | ---: |")
    for name in (None, *COMPRESSIONS.available()):
        if name not in NOT_BY_VECTOR:
            times, size = measure(name, arguments.numel, device, arguments.repetitions)
            cells = [_speed(arguments.numel, times[part]) for part in ("encode", "decode by rank 0")]
            print(f"| {name or 'none'} | {size:.3f} | {' | '.join(cells)} |", flush=True)


def _speed(numel: int, seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms, {4 * numel / seconds / 1e9:.1f} GB/s"


if __name__ == "__main__":
    main()
