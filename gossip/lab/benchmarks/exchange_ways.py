"""The median time of each way that a message can take over gloo, by its size and the number of ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field

from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Place, Record
from gossip.lab.benchmarks.summaries import table

PIECE_NUMEL = 2**17
SIZES = (1_000, 16_000, 64_000, 256_000, 1_000_000, 4_200_000, 16_800_000)
Exchange = Callable[[torch.Tensor, dict[int, torch.Tensor]], None]


class ExchangeWaysSettings(BenchmarkSettings):
    """The settings of a run: every way is repeated, after one exchange that is not measured."""

    repetitions: int = Field(ge=1)


class Timing(BaseModel):
    """The median milliseconds of an exchange of a message among some ranks, in one way."""

    ranks: int
    num_bytes: int
    way: str
    median_ms: float


class ExchangeWaysResult(BaseModel):
    """The timings on one kind of link; None on loopback."""

    link: str | None
    timings: list[Timing]


class ExchangeWays(Benchmark[ExchangeWaysSettings, ExchangeWaysResult]):
    """Two ranks, and then all of them, exchange messages of several sizes in every way."""

    settings = ExchangeWaysSettings
    title = "Milliseconds of an exchange over gloo"
    explanation = "The fastest of a row is bold."

    def work(self, case: ExchangeWaysSettings, place: Place) -> Iterator[Record]:
        """Yield, on rank 0, the median time of each way for each size."""
        for ranks in sorted({2, case.world_size}):
            group = dist.new_group(range(ranks))
            for num_bytes in SIZES if place.rank < ranks else ():
                for way, exchange in _ways(group, ranks).items():
                    median_ms = 1e3 * _median_s(group, exchange, num_bytes, place.rank, case.repetitions)
                    place.show_life()
                    if place.rank == 0:
                        yield {"ranks": ranks, "num_bytes": num_bytes, "way": way, "median_ms": median_ms}
            dist.barrier()

    def result(self, case: ExchangeWaysSettings, records: Sequence[Sequence[Mapping[str, Any]]]) -> ExchangeWaysResult:
        """Return the timings of rank 0."""
        return ExchangeWaysResult(link=case.link, timings=[Timing.model_validate(record) for record in records[0]])

    def sections(self, results: Sequence[ExchangeWaysResult]) -> list[str]:
        """Return a table of milliseconds for each kind of link."""
        return [part for result in results for part in (f"## {result.link or 'Loopback'}", _table(result.timings))]


def _table(timings: Sequence[Timing]) -> str:
    rows = []
    for ranks, num_bytes in dict.fromkeys((timing.ranks, timing.num_bytes) for timing in timings):
        row = [timing.median_ms for timing in timings if (timing.ranks, timing.num_bytes) == (ranks, num_bytes)]
        cells = (f"**{value:.2f}**" if value == min(row) else f"{value:.2f}" for value in row)
        rows.append([str(ranks), f"{num_bytes / 1e3:g}", *cells])
    return table(["ranks", "message, kB", *dict.fromkeys(timing.way for timing in timings)], rows)


def _median_s(group: dist.ProcessGroup, exchange: Exchange, num_bytes: int, rank: int, repetitions: int) -> float:
    message = torch.zeros(num_bytes // 4)
    arrived = {peer: torch.empty_like(message) for peer in range(group.size()) if peer != rank}
    times_s = []
    for _ in range(1 + repetitions):
        group.barrier().wait()
        start = time.perf_counter()
        exchange(message, arrived)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s[1:])


def _ways(group: Any, ranks: int) -> dict[str, Exchange]:
    """Return functions that exchange a message [numel] with all other ranks; what arrives goes into a tensor per rank.

    The messages of "point-to-point" are sent as a whole, receives posted first; of "in pieces" in pieces of 512 KiB,
    two at a time; and of "sends first" with sends posted first.
    """

    def wait(works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait()

    def all_reduce(message: torch.Tensor, _: dict[int, torch.Tensor]) -> None:
        wait([group.allreduce([message])])

    def all_gather(message: torch.Tensor, arrived: dict[int, torch.Tensor]) -> None:
        wait([group.allgather([[arrived.get(each, message) for each in range(ranks)]], [message])])

    def post(message: torch.Tensor, arrived: dict[int, torch.Tensor]) -> list[dist.Work]:
        works = [group.recv([room], peer, 0) for peer, room in arrived.items()]
        return works + [group.send([message], peer, 0) for peer in arrived]

    def point_to_point(message: torch.Tensor, arrived: dict[int, torch.Tensor]) -> None:
        wait(post(message, arrived))

    def in_pieces(message: torch.Tensor, arrived: dict[int, torch.Tensor]) -> None:
        under_way: list[list[dist.Work]] = []
        receive_buffers = [room.split(PIECE_NUMEL) for room in arrived.values()]
        for number, piece in enumerate(message.split(PIECE_NUMEL)):
            if len(under_way) == 2:
                wait(under_way.pop(0))
            into = {peer: pieces[number] for peer, pieces in zip(arrived, receive_buffers, strict=True)}
            under_way.append(post(piece, into))
        for works in under_way:
            wait(works)

    def sends_first(message: torch.Tensor, arrived: dict[int, torch.Tensor]) -> None:
        works = [group.send([message], peer, 0) for peer in arrived]
        wait([*works, *(group.recv([room], peer, 0) for peer, room in arrived.items())])

    return {
        "all-reduce": all_reduce,
        "all-gather": all_gather,
        "point-to-point": point_to_point,
        "in pieces": in_pieces,
        "sends first": sends_first,
    }
