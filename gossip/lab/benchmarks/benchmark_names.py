"""The benchmarks that there are, by their names."""

from __future__ import annotations

from typing import Any

from gossip.lab.benchmarks.benchmark import Benchmark
from gossip.lab.benchmarks.compression_speed import CompressionSpeed
from gossip.lab.benchmarks.exchange_ways import ExchangeWays
from gossip.lab.benchmarks.large_model import LargeModel
from gossip.lab.benchmarks.memory_by_mode import MemoryUse
from gossip.lab.benchmarks.overhead import Overhead
from gossip.lab.benchmarks.overlap import Overlap
from gossip.lab.benchmarks.predicted_steps import PredictedSteps
from gossip.lab.benchmarks.stability import Stability
from gossip.lab.benchmarks.step_time import StepTime
from gossip.lab.benchmarks.time_to_loss import TimeToLoss
from gossip.lab.benchmarks.topology_scale import TopologyScale
from gossip.lab.benchmarks.uneven_ranks import UnevenRanks
from gossip.lab.benchmarks.virtual_speed import VirtualSpeed
from gossip.lab.faults.chaos import Chaos
from gossip.lab.probe.probe import Probe

BENCHMARKS: dict[str, type[Benchmark[Any, Any]]] = {
    "step_time": StepTime,
    "time_to_loss": TimeToLoss,
    "predicted_steps": PredictedSteps,
    "exchange_ways": ExchangeWays,
    "overhead": Overhead,
    "overlap": Overlap,
    "uneven_ranks": UnevenRanks,
    "virtual_speed": VirtualSpeed,
    "large_model": LargeModel,
    "memory_use": MemoryUse,
    "compression_speed": CompressionSpeed,
    "topology_scale": TopologyScale,
    "stability": Stability,
    "probe": Probe,
    "chaos": Chaos,
}
