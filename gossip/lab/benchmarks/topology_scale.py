"""What topologies of thousands of ranks, and rounds of a million, cost: time, memory and analysis, family by family."""

from __future__ import annotations

import functools
import gc
import itertools
import signal
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, PositiveFloat

import topologies
from gossip.errors import LaunchError
from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Place, Record, Records, RowsBenchmark, Write
from gossip.lab.benchmarks.network.counters import PeakMemory
from gossip.lab.experiments.validated_models import OneOf
from topologies import Topology
from topologies.schedule import options_text

_LARGE_FAMILIES = ("one_peer_exponential", "one_peer_hypercube", "ring", "base", "random_matching")
_MOST_ROUNDS = 16
_REPEATS = 3
_NUM_LARGE_CALLS = 400


class TopologyScaleSettings(BenchmarkSettings):
    """The settings of a run; a case is a row of a table, which one worker measures."""

    world_size: int = Field(4096, ge=2, description="ranks of the first table")
    large_world_size: int = Field(1_000_000, ge=2, description="ranks of the second table")
    families: tuple[Annotated[str, OneOf(topologies.available())], ...] = Field(
        tuple(topologies.available()), min_length=1, description="of topologies"
    )
    time_limit_s: PositiveFloat = Field(300.0, description="seconds per row")
    size: int = 0
    options: dict[str, Any] | None = None
    """Of the topology of a case; those of the second table have none."""

    def cases(self) -> Iterator[tuple[str, Self]]:
        power = min((2**k for k in range(1, 64)), key=lambda power: abs(power - self.large_world_size))
        large = dict.fromkeys(_LARGE_FAMILIES, self.large_world_size) | {"one_peer_hypercube": power}
        rows: Iterator[tuple[str, int, dict[str, Any] | None]] = itertools.chain(
            ((name, *served) for name in self.families for served in served_variants(name, self.world_size)),
            ((name, large[name], None) for name in self.families if name in large),
        )
        for number, (name, size, options) in enumerate(rows):
            of_row = {"world_size": 1, "families": (name,), "size": size, "options": options}
            yield f"{number}_{name}", self.model_copy(update=of_row)


def served_variants(name: str, world_size: int) -> list[tuple[int, dict[str, Any]]]:
    """Return the size nearest to ``world_size`` that a family serves, with the options of each of its variants there.

    Without a size up to twice as large, the family itself is to say why it does not serve this one.
    """
    for distance in range(world_size):
        for size in dict.fromkeys((world_size - distance, world_size + distance)):
            if size >= 2 and (found := topologies.variants(name, size)):
                return [(size, dict(topology.options)) for topology in found]
    return [(world_size, {})]


class TopologyScale(RowsBenchmark[TopologyScaleSettings]):
    """A worker builds one topology, several times, and uses its rounds."""

    settings = TopologyScaleSettings
    title = "What large topologies cost"

    def work(self, case: TopologyScaleSettings, place: Place, write: Write) -> None:  # noqa: ARG002
        """Write the row of the case, or why there is none."""

        def stop(*_: object) -> None:
            raise TimeoutError(f"more than {case.time_limit_s:g} s")

        gc.freeze()  # a collection that walked over all imported modules would take 10 ms
        row = _of(case)
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, case.time_limit_s)
        try:
            if case.options is None:
                row |= measure_large(row["family"], case.size)
            else:
                row |= measure(row["family"], case.size, case.options)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        write(row)

    def instead(self, case: TopologyScaleSettings, error: LaunchError) -> Records:
        """Return a row that says why there is none: there may be too little memory for this one."""
        return [[{**_of(case), "failed": " ".join(str(error).split())}]]


def _of(case: TopologyScaleSettings) -> Record:
    """Return what a row begins with."""
    (name,) = case.families
    options = {} if case.options is None else {"options": options_text(case.options)[:44]}
    return {"family": name, "n": case.size, **options}


def elapsed(work: Callable[..., Any], *arguments: object) -> tuple[float, Any]:
    """Return the processor time that a call takes, in seconds, and its result."""
    begin = time.process_time()
    result = work(*arguments)
    return time.process_time() - begin, result


def rounds_of(topology: Topology) -> range:
    """The rounds that are looked at."""
    return range(min(topology.period or _MOST_ROUNDS, _MOST_ROUNDS))


def use_row(topology: Topology, t: int, rank: int) -> None:
    """Use the row of a rank in a round."""
    topology.round(t).neighbours(rank)


def use_rows(topology: Topology, ranks: Iterable[int]) -> None:
    """Use the rows of these ranks in the rounds."""
    for t in rounds_of(topology):
        round_ = topology.round(t)
        for rank in ranks:
            round_.neighbours(rank)


def measure(name: str, world_size: int, options: dict[str, Any]) -> Record:
    """Return the numbers of one row of the first table."""
    memory, times = PeakMemory(), list[dict[str, float]]()
    build = functools.partial(topologies.build, name, world_size, **options)
    num_rounds = len(rounds_of(build()))
    for _ in range(_REPEATS):
        build_s, topology = elapsed(build)
        one_rank_s, _ = elapsed(use_rows, topology, [world_size // 3])
        all_s, _ = elapsed(use_rows, build(), range(world_size))
        topology = build()
        first_s, _ = elapsed(use_row, topology, 0, 0)
        times.append(
            {
                "build, ms": 1e3 * build_s,
                "first, ms": 1e3 * first_s,
                "row, us": 1e6 * all_s / num_rounds / world_size,
                "one rank, us": 1e6 * one_rank_s / num_rounds,
            }
        )
    num_edges = sum(int(topology.round(t).num_sources().sum()) + world_size for t in rounds_of(topology))
    del topology
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    use_rows(build(), range(world_size))
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    describe_s, _ = elapsed(build().describe)
    return {
        **{key: min(each[key] for each in times) for key in times[0]},
        "B/edge": peak / num_edges,
        "describe, s": describe_s,
        "MiB": memory.bytes() / 2**20,
    }


def measure_large(name: str, world_size: int) -> Record:
    """Return the numbers of one row of the second table."""
    memory = PeakMemory()
    use_rows(topologies.build(name, 8), range(8))  # copies the pages that this process shares with the fork server
    build_s, topology = elapsed(topologies.build, name, world_size)
    generator = np.random.default_rng(0)
    steps = generator.integers(topology.period or 1000, size=_NUM_LARGE_CALLS).tolist()
    ranks = generator.integers(world_size, size=_NUM_LARGE_CALLS).tolist()
    seconds = [elapsed(use_row, topology, t, rank)[0] for t, rank in zip(steps, ranks, strict=True)]
    return {
        "build, ms": 1e3 * build_s,
        "median, us": 1e6 * statistics.median(seconds),
        "largest, us": 1e6 * max(seconds),
        "MiB": memory.bytes() / 2**20,
    }
