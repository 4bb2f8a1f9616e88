"""What topologies of thousands of ranks, and rounds of a million, cost: time, memory and analysis, family by family.

    OPENBLAS_NUM_THREADS=1 python scripts/topology_scale.py
    python scripts/topology_scale.py world_size=1024 --families ring base --large-world-size 100000

The first table has a row for every variant of a family at the served size nearest to ``--world-size``, each measured in
a process of its own; times are the least of three runs, except that of the analysis.

build       ``topologies.build`` with the variant's options
first       ``round(0)`` and the row of one rank, the first time
row         ``round(t).neighbours(rank)`` of every rank, per row; the making of the rounds is included
one rank    the same for one rank alone, per round: what a worker pays that reads its own row only
B/edge      most bytes in use at once while all that is done, per edge of the rounds, own weights included
describe    ``topology.describe()``, everything that can be measured, of a topology that has made no round yet
MiB         the most memory of the process that did all this

Times are processor time of one thread, which other programs on the machine disturb less.

Rounds are those of one period, the first 16 at most. The second table is about ``round(t).neighbours(rank)`` for random
t and rank, rounds that are used for the first time included; n is ``--large-world-size``, or the nearest power of two.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import multiprocessing
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import numpy as np

import topologies
from topologies import Topology
from topologies.command_lines import Parser
from topologies.schedule import options_text

T = TypeVar("T")
LARGE_FAMILIES = ("one_peer_exponential", "one_peer_hypercube", "ring", "base", "random_matching")
MOST_ROUNDS = 16
REPEATS = 3
NUM_LARGE_CALLS = 400


def served_variants(name: str, world_size: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the size nearest to ``world_size`` that a family serves, and the options of its variants there."""
    for distance in range(world_size):
        for size in dict.fromkeys((world_size - distance, world_size + distance)):
            if size >= 2 and (found := topologies.variants(name, size)):
                return size, [dict(topology.options) for topology in found]
    raise ValueError(f"family {name!r} serves no world_size from 2 to {2 * world_size - 1}; choose a larger one")


def elapsed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor time that a call takes, in seconds, and its result."""
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def rounds_of(topology: Topology) -> range:
    """The rounds that are looked at."""
    return range(min(topology.period or MOST_ROUNDS, MOST_ROUNDS))


def all_rows(topology: Topology) -> None:
    """Use every row of the rounds."""
    for t in rounds_of(topology):
        round_ = topology.round(t)
        for rank in range(topology.world_size):
            round_.neighbours(rank)


def rows_of_one_rank(topology: Topology) -> None:
    """Use the rows of one rank."""
    for t in rounds_of(topology):
        topology.round(t).neighbours(topology.world_size // 3)


def measure(name: str, world_size: int, options: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of one row of the first table."""
    build = functools.partial(topologies.build, name, world_size, **options)
    num_rounds = len(rounds_of(build()))
    timed: dict[str, list[float]] = {"build_s": [], "first_s": [], "row_s": [], "one_rank_s": []}
    for _ in range(REPEATS):
        seconds, topology = elapsed(build)
        timed["build_s"].append(seconds)
        timed["one_rank_s"].append(elapsed(lambda: rows_of_one_rank(topology))[0] / num_rounds)  # noqa: B023
        topology = build()
        timed["row_s"].append(elapsed(lambda: all_rows(topology))[0] / num_rounds / world_size)  # noqa: B023
        topology = build()
        timed["first_s"].append(elapsed(lambda: topology.round(0).neighbours(0))[0])  # noqa: B023
    num_edges = sum(int(topology.round(t).num_sources().sum()) + world_size for t in rounds_of(topology))
    del topology
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    all_rows(build())
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    topology = build()
    describe_s, _ = elapsed(topology.describe)
    return {
        **{key: min(seconds) for key, seconds in timed.items()},
        "bytes_per_edge": peak / num_edges,
        "describe_s": describe_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def measure_large(name: str, world_size: int) -> dict[str, float]:
    """Return the numbers of one row of the second table."""
    powers_of_two = 1 << (world_size.bit_length() - 1), 1 << world_size.bit_length()
    size = min(powers_of_two, key=lambda size: abs(size - world_size)) if name == "one_peer_hypercube" else world_size
    build_s, topology = elapsed(lambda: topologies.build(name, size))
    generator = np.random.default_rng(0)
    period = topology.period or 1000
    calls = zip(
        generator.integers(period, size=NUM_LARGE_CALLS).tolist(),
        generator.integers(size, size=NUM_LARGE_CALLS).tolist(),
        strict=True,
    )
    gc.freeze()  # one pass over all imported modules takes 10 ms
    seconds = [elapsed(lambda t=t, rank=rank: topology.round(t).neighbours(rank))[0] for t, rank in calls]  # type: ignore[misc]
    return {
        "size": size,
        "build_s": build_s,
        "median_s": statistics.median(seconds),
        "largest_s": max(seconds),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_a_process(work: Callable[..., T], *arguments: object, time_limit_s: float) -> T | str:
    """Return what a call gives in a process of its own, or why it gives nothing."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments).result(time_limit_s)
        except TimeoutError:
            for process in multiprocessing.active_children():
                process.kill()
            return f"more than {time_limit_s:g} s"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def table_rows(families: Sequence[str], world_size: int, time_limit_s: float) -> Iterator[list[str]]:
    """Yield the rows of the first table."""
    for name in families:
        served = in_a_process(served_variants, name, world_size, time_limit_s=time_limit_s)
        if isinstance(served, str):
            yield [name, "", served]
            continue
        size, variants = served
        for options in variants:
            row = [name, str(size), options_text(options)[:44]]
            found = in_a_process(measure, name, size, options, time_limit_s=time_limit_s)
            if isinstance(found, str):
                yield [*row, found]
                continue
            yield [
                *row,
                f"{found['build_s'] * 1e3:.1f} ms",
                f"{found['first_s'] * 1e3:.2f} ms",
                f"{found['row_s'] * 1e6:.1f} us",
                f"{found['one_rank_s'] * 1e6:.0f} us",
                f"{found['bytes_per_edge']:.1f}",
                f"{found['describe_s']:.2f} s",
                f"{found['peak_bytes'] / 2**20:.0f}",
            ]


def large_rows(families: Sequence[str], world_size: int, time_limit_s: float) -> Iterator[list[str]]:
    """Yield the rows of the second table."""
    for name in filter(LARGE_FAMILIES.__contains__, families):
        found = in_a_process(measure_large, name, world_size, time_limit_s=time_limit_s)
        if isinstance(found, str):
            yield [name, "", found]
            continue
        calls = [f"{found[key] * 1e6:.0f} us" for key in ("median_s", "largest_s")]
        build = f"{found['build_s'] * 1e3:.2f} ms"
        yield [name, str(found["size"]), build, *calls, f"{found['peak_bytes'] / 2**20:.0f}"]


def print_table(header: str, rows: Iterator[list[str]]) -> None:
    """Print rows in Markdown as they come."""
    columns = header.split(", ")
    for row in itertools.chain([columns, ["---"] * len(columns)], rows):
        print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4096, help="ranks of the first table")
    parser.add_argument("--large-world-size", type=int, default=1_000_000, help="ranks of the second table")
    parser.add_argument("--families", nargs="+", choices=topologies.available(), default=topologies.available())
    parser.add_argument("--time-limit-s", type=float, default=300.0, help="seconds per process")
    arguments = parser.parse_args()
    limits = {"time_limit_s": arguments.time_limit_s}
    header = "family, n, options, build, first, row, one rank, B/edge, describe, MiB"
    print_table(header, table_rows(arguments.families, arguments.world_size, **limits))
    print()
    large = large_rows(arguments.families, arguments.large_world_size, **limits)
    print_table("family, n, build, median, largest, MiB", large)


if __name__ == "__main__":
    main()
