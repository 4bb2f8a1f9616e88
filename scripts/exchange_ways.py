"""Which way a message takes over gloo, by its size and the number of ranks that exchange: the median time of each way.

    python scripts/exchange_ways.py
    python scripts/exchange_ways.py --network lab --rate 200mbit

Ways: one all-reduce of the values; an all-gather of them; every message point-to-point as a whole, receives posted
first; the same in pieces of 512 KiB, two at a time; and with sends posted first. In the lab every rank is a host of its
own behind a shaped link (Linux, root). gossip.DistributedTransport takes what this shows to be the fastest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import IO, Any

import torch
import torch.distributed as dist

from gossip.lab.benchmarks.network.networks import Link, Network
from gossip.lab.benchmarks.network.shaped_hosts import Lab

TIMEOUT = timedelta(seconds=120)
PIECE_NUMEL = 2**17
SIZES = (1_000, 16_000, 64_000, 256_000, 1_000_000, 4_200_000, 16_800_000)
Exchange = Callable[[torch.Tensor, dict[int, torch.Tensor]], None]


def ways(group: Any, size: int) -> dict[str, Exchange]:
    """Each exchanges a message [numel] with all other ranks; what arrives goes into a tensor per rank."""

    def wait(works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait()

    def all_reduce(message: torch.Tensor, _: dict[int, torch.Tensor]) -> None:
        wait([group.allreduce([message])])

    def all_gather(message: torch.Tensor, arrived: dict[int, torch.Tensor]) -> None:
        wait([group.allgather([[arrived.get(each, message) for each in range(size)]], [message])])

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


def work(rank: int, world_size: int, places: Any, interface: str, repetitions: int, numbers: IO[str]) -> None:
    """Measure on one rank; rank 0 writes a line of JSON for each number."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    address, port = places.get()
    store = dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)
    for size in sorted({2, world_size}):
        group = None
        if rank < size:
            group = dist.ProcessGroupGloo(dist.PrefixStore(f"{size} ranks", store), rank, size, TIMEOUT)
            for num_bytes in SIZES:
                for way, exchange in ways(group, size).items():
                    message = torch.zeros(num_bytes // 4)
                    arrived = {peer: torch.empty_like(message) for peer in range(size) if peer != rank}
                    times = []
                    for _ in range(1 + repetitions):
                        group.barrier().wait()
                        start = time.perf_counter()
                        exchange(message, arrived)
                        times.append(time.perf_counter() - start)
                    if rank == 0:
                        median = 1e3 * statistics.median(times[1:])
                        print(json.dumps([size, num_bytes, way, median]), file=numbers, flush=True)
            group.barrier().wait()
        store.set(f"{size} ranks, rank {rank}", "done")
        store.wait([f"{size} ranks, rank {each}" for each in range(world_size)], TIMEOUT)


def measure(network: Network, world_size: int, repetitions: int) -> list[list[Any]]:
    """Fork a process per rank; the numbers of rank 0."""
    context = multiprocessing.get_context("fork")
    places = context.SimpleQueue()
    with contextlib.ExitStack() as stack:
        numbers = stack.enter_context(tempfile.TemporaryFile("w+"))
        processes = []
        for rank in range(world_size):
            told = rank, world_size, places, network.interface, repetitions, numbers
            process = context.Process(target=work, args=told, daemon=True)
            with network.entered(rank):
                process.start()
            stack.callback(process.kill)
            processes.append(process)
        store = network.start_store(TIMEOUT)  # not before: it has threads, which a fork would not have
        for _ in processes:
            places.put((store.host, store.port))
        processes[0].join()
        for process in processes:
            process.join(TIMEOUT.total_seconds())
        statuses = [process.exitcode for process in processes]
        numbers.seek(0)
        lines = numbers.readlines()
    if any(status != 0 for status in statuses):
        raise SystemExit(f"a rank failed: exit statuses {statuses}")
    return [json.loads(line) for line in lines]


def table(numbers: list[list[Any]]) -> str:
    """Markdown: milliseconds; the fastest of a row in bold."""
    names = list(dict.fromkeys(way for _, _, way, _ in numbers))
    lines = ["| ranks | message, kB | " + " | ".join(names) + " |", "| ---: " * (2 + len(names)) + "|"]
    for size, num_bytes in dict.fromkeys((size, num_bytes) for size, num_bytes, _, _ in numbers):
        row = {way: value for *key, way, value in numbers if key == [size, num_bytes]}
        best = min(row.values())
        cells = [f"**{value:.2f}**" if value == best else f"{value:.2f}" for value in row.values()]
        lines.append(f"| {size} | {num_bytes / 1e3:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--network", choices=["loopback", "lab"], default="loopback")
    parser.add_argument("--rate", default="200mbit", help="of every link of the lab, each way")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.world_size < 2 or arguments.repetitions < 1:
        parser.error("--world-size must be at least 2 and --repetitions at least 1")
    network = Network()
    where = "loopback"
    if arguments.network == "lab":
        network = Lab(arguments.world_size, Link.parse(arguments.rate))
        where = f"links of {arguments.rate}"
    try:
        numbers = measure(network, arguments.world_size, arguments.repetitions)
    finally:
        network.close()
    print(f"Milliseconds of an exchange over gloo, {where}, torch {torch.__version__}:\n\n{table(numbers)}")


if __name__ == "__main__":
    main()
