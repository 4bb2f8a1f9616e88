"""The median time of each way that a message can take over gloo, by its size and the number of ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field

from gossip.lab.benchmarks.benchmark import BenchmarkSettings, Links, Place, Record, RowsBenchmark, Write

PIECE_NUMEL = 2**17
SIZES = (1_000, 16_000, 64_000, 256_000, 1_000_000, 4_200_000, 16_800_000)
Arrived = dict[int, torch.Tensor]
Post = Callable[[torch.Tensor, Arrived], Iterable[dist.Work]]


class ExchangeWaysSettings(BenchmarkSettings):
    """The settings of a run: every way is repeated, after one exchange that is not measured."""

    network: Literal["loopback", "lab"] = Field("loopback", description="or lab: a shaped link for each rank")
    links: Links = Field(("200mbit",), alias="rate", description="of every link of the lab, each way")
    repetitions: int = Field(5, ge=1, description="of every exchange")


class ExchangeWays(RowsBenchmark[ExchangeWaysSettings]):
    """Two ranks, and then all of them, exchange messages of several sizes in every way."""

    settings = ExchangeWaysSettings
    title = "Milliseconds of an exchange over gloo"
    explanation = "Medians of each way; the fastest of a row is bold."

    def work(self, case: ExchangeWaysSettings, place: Place, write: Write) -> None:
        """Write the median milliseconds of each way for each number of ranks and size."""
        for ranks in sorted({2, case.world_size}):
            group = dist.new_group(range(ranks))
            for num_bytes in SIZES if place.rank < ranks else ():
                found = {
                    way: 1e3 * _median_s(group, post, num_bytes, place.rank, case.repetitions)
                    for way, post in _ways(group, ranks).items()
                }
                write({"ranks": ranks, "message, kB": num_bytes // 1000, **found})
            dist.barrier()

    def cells(self, row: Record) -> list[str]:
        least = min(value for value in row.values() if isinstance(value, float))
        return [
            f"**{text}**" if value == least else text
            for text, value in zip(super().cells(row), row.values(), strict=True)
        ]


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
