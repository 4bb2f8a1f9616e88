"""The median time of each way that a message can take over gloo, by its size and the number of ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field

from gossip.lab.benchmarks.benchmark import Benchmark, BenchmarkSettings, Links, Place, Records, Write
from gossip.lab.benchmarks.summaries import table

PIECE_NUMEL = 2**17
SIZES = (1_000, 16_000, 64_000, 256_000, 1_000_000, 4_200_000, 16_800_000)
Arrived = dict[int, torch.Tensor]
Post = Callable[[torch.Tensor, Arrived], Iterable[dist.Work]]


class ExchangeWaysSettings(BenchmarkSettings):
    """The settings of a run: every way is repeated, after one exchange that is not measured."""

    network: Literal["loopback", "lab"] = Field("loopback", description="or lab: a shaped link for each rank")
    links: Links = Field(("200mbit",), alias="rate", description="of every link of the lab, each way")
    repetitions: int = Field(5, ge=1, description="of every exchange")


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

    def work(self, case: ExchangeWaysSettings, place: Place, write: Write) -> None:
        """Write the median time of each way for each size."""
        for ranks in sorted({2, case.world_size}):
            group = dist.new_group(range(ranks))
            for num_bytes in SIZES if place.rank < ranks else ():
                for way, post in _ways(group, ranks).items():
                    median_ms = 1e3 * _median_s(group, post, num_bytes, place.rank, case.repetitions)
                    write({"ranks": ranks, "num_bytes": num_bytes, "way": way, "median_ms": median_ms})
            dist.barrier()

    def result(self, case: ExchangeWaysSettings, records: Records) -> ExchangeWaysResult:
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


def _median_s(group: dist.ProcessGroup, post: Post, num_bytes: int, rank: int, repetitions: int) -> float:
    message = torch.zeros(num_bytes // 4)
    arrived = {peer: torch.empty_like(message) for peer in range(group.size()) if peer != rank}
    times_s = []
    for _ in range(1 + repetitions):
        group.barrier().wait()
        start = time.perf_counter()
        for work in post(message, arrived):
            work.wait()
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s[1:])


def _ways(group: Any, ranks: int) -> dict[str, Post]:
    """Return functions that post the exchange of a message [numel] with all others, and give works to be waited for.

    The messages of "point-to-point" are sent as a whole, receives posted first; of "in pieces" in pieces of 512 KiB,
    two at a time; and of "sends first" with sends posted first.
    """

    def sends(message: torch.Tensor, arrived: Arrived) -> list[dist.Work]:
        return [group.send([message], peer, 0) for peer in arrived]

    def receives(arrived: Arrived) -> list[dist.Work]:
        return [group.recv([room], peer, 0) for peer, room in arrived.items()]

    def in_pieces(message: torch.Tensor, arrived: Arrived) -> Iterator[dist.Work]:
        """Yield works to be waited for: the pieces after the next one are posted when one has arrived."""
        under_way: list[list[dist.Work]] = []
        rooms = {peer: room.split(PIECE_NUMEL) for peer, room in arrived.items()}
        for number, piece in enumerate(message.split(PIECE_NUMEL)):
            if len(under_way) == 2:
                yield from under_way.pop(0)
            into = {peer: pieces[number] for peer, pieces in rooms.items()}
            under_way.append([*receives(into), *sends(piece, into)])
        for works in under_way:
            yield from works

    return {
        "all-reduce": lambda message, _: [group.allreduce([message])],
        "all-gather": lambda message, arrived: [
            group.allgather([[arrived.get(each, message) for each in range(ranks)]], [message])
        ],
        "point-to-point": lambda message, arrived: [*receives(arrived), *sends(message, arrived)],
        "in pieces": in_pieces,
        "sends first": lambda message, arrived: [*sends(message, arrived), *receives(arrived)],
    }
