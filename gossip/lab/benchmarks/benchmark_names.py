"""The benchmarks that there are, by their names."""

from __future__ import annotations

from typing import Any

from gossip.lab.benchmarks.benchmark import Benchmark
from gossip.lab.benchmarks.compression_speed import CompressionSpeed
from gossip.lab.benchmarks.large_model import LargeModel
from gossip.lab.benchmarks.overhead import Overhead
from gossip.lab.benchmarks.overlap import Overlap
from gossip.lab.benchmarks.step_time import StepTime
from gossip.lab.benchmarks.time_to_loss import TimeToLoss
from gossip.lab.faults.chaos import Chaos
from gossip.lab.probe.probe import Probe

BENCHMARKS: dict[str, type[Benchmark[Any, Any]]] = {
    "step_time": StepTime,
    "time_to_loss": TimeToLoss,
    "overhead": Overhead,
    "overlap": Overlap,
    "large_model": LargeModel,
    "compression_speed": CompressionSpeed,
    "probe": Probe,
    "chaos": Chaos,
}
