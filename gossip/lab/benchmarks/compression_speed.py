"""How fast compressions encode and decode one bucket, next to a copy of it."""

import statistics
import time

import torch
from pydantic import Field, PositiveInt

from gossip import COMPRESSIONS, BucketShape, Uncompressed
from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place, RowsBenchmark, Write
from gossip.lab.probe.compute_probe import PretendedExchange, clock_of

_NUM_WARM_UP = 3
_PIECES = ("copy", "encode", "check", "decode and mix")
_NOT_BY_VECTOR = ("powergossip",)  # its bytes depend on the matrices


class CompressionSpeedSettings(BenchmarkSettings):
    """The settings of a run."""

    world_size: int = 1
    numel: PositiveInt = Field(4_200_000, description="values in the bucket")
    device: str = Field("cpu", description="that codes them")
    repetitions: PositiveInt = Field(15, description="of each exchange")


class CompressionSpeed(RowsBenchmark[CompressionSpeedSettings]):
    """A rank exchanges with itself and copies its values in between."""

    settings = CompressionSpeedSettings
    title = "GB/s of float32 values"

    def work(self, case: CompressionSpeedSettings, place: Place, write: Write) -> None:  # noqa: ARG002
        """Write the bytes of a value and the speed of every piece for each compression."""
        device = torch.device(case.device)
        clock = time.thread_time if device.type == "cpu" else clock_of(device)  # other programs disturb that one less
        for name in (None, *COMPRESSIONS.available()):
            if name in _NOT_BY_VECTOR:
                continue
            torch.manual_seed(0)
            values = torch.randn(case.numel).to(device)
            copy = torch.empty_like(values)
            compression = Uncompressed() if name is None else COMPRESSIONS.get(name)()
            exchange = PretendedExchange(values, BucketShape(0, values), compression, clock)
            spent_s = []
            for step in range(_NUM_WARM_UP + case.repetitions):
                start = clock()
                copy.copy_(values)
                spent_s.append((clock() - start, *exchange.parts_s(step)))
                values.add_(1e-3)
            medians = map(statistics.median, zip(*spent_s[_NUM_WARM_UP:], strict=True))
            speeds = {piece: 4e-9 * case.numel / took_s for piece, took_s in zip(_PIECES, medians, strict=True)}
            write({"compression": name or "none", "bytes per value": exchange.num_bytes / case.numel, **speeds})
