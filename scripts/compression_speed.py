"""How fast compressions encode and decode one bucket, next to a copy of it.

    python scripts/compression_speed.py
    python scripts/compression_speed.py --device cuda --numel 67108864

Two ranks exchange in one thread of one process, and copy their values in between. GB/s are of the values (4 bytes)
per second of the thread's own time on a CPU, of the device's time elsewhere; behind them, the share of the copy's.
Check is all between the message's arrival and the first part of what is decoded; decode makes the parts, and mix adds
them to the values.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import topologies
from gossip import AdaptWhileCommunicating, BucketShape, Conversation, Delivery
from gossip.compression.compiled_passes import quantized_by
from gossip.compression.compression_names import COMPRESSIONS, resolve_compression

NUM_WARM_UP = 3
PIECES = {"encode": "encode", "check": "check by rank 0", "decode": "decode", "mix": "mix"}
"""Columns, by what is measured under which name."""
NOT_BY_VECTOR = ("powergossip",)  # its bytes depend on the matrices


class Clock:
    """Adds up what a device takes for pieces of work, by their names, of each rank in each step."""

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        self._pieces: defaultdict[str, Counter[tuple[int, int]]] = defaultdict(Counter)

    def time(self, name: str, step: int, rank: int, work: Callable[[], Any]) -> Any:
        """What it returns; adds how long it took."""
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
        self._pieces[name][step, rank] += took
        return result

    def medians(self) -> dict[str, float]:
        """Seconds, without the first few."""
        return {name: statistics.median(list(times.values())[NUM_WARM_UP:]) for name, times in self._pieces.items()}


def measure(name: str | None, numel: int, device: torch.device, repetitions: int) -> tuple[dict[str, float], float]:
    """Seconds of each piece; bytes per value of the newest message."""
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

    def mix(conversation: Conversation, step: int, rank: int) -> None:
        parts, ends = conversation.arrival.parts, (None, None)
        while True:
            part, difference = clock.time("decode", step, rank, partial(next, parts, ends))
            if part is None:
                return
            clock.time("mix", step, rank, partial(algorithm.combine_, values[rank][part], difference, 0))

    copies = [torch.empty_like(replica) for replica in values]
    for step in range(NUM_WARM_UP + repetitions):
        for rank, copy in enumerate(copies):
            clock.time("copy", step, rank, partial(copy.copy_, values[rank]))
        conversations: list[Conversation] = [
            clock.time("encode", step, rank, partial(codec.exchange, values[rank], round_, step))
            for rank, codec in enumerate(codecs)
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
        while (
            turns := [
                clock.time(f"check by rank {rank}", step, rank, partial(next, more, None))
                for rank, more in enumerate(under_way)
            ]
        ) != [None, None]:
            for rank, turn in enumerate(turns):
                for source, buffer in turn.receive_buffers.items():
                    buffer.copy_(turns[source].sent[rank])
        for rank, conversation in enumerate(conversations):
            mix(conversation, step, rank)
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
    print(
        f"{arguments.numel} float32 on {device}, torch {torch.__version__}, int8 and int4 by "
        f"{quantized_by() if device.type == 'cpu' else 'torch'}:\n"
    )
    print("| compression | bytes per value | copy |" + "".join(f" {piece} |" for piece in PIECES))
    print("| --- " + "| ---: " * (2 + len(PIECES)) + "|")
    for name in (None, *COMPRESSIONS.available()):
        if name not in NOT_BY_VECTOR:
            times, size = measure(name, arguments.numel, device, arguments.repetitions)
            speeds = {piece: 4 * arguments.numel / took / 1e9 for piece, took in times.items()}
            cells = [f"{speeds[key]:.1f} ({speeds[key] / speeds['copy']:.2f})" for key in PIECES.values()]
            print(f"| {name or 'none'} | {size:.3f} | {speeds['copy']:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
