"""Measurement of latency and bandwidth between pairs of ranks, while all ranks exchange."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist

from gossip.communication.host import daemon_threads
from gossip.communication.json_gathering import all_gather_json
from gossip.launching import DEFAULT_TIMEOUT

_MAX_RANKS_OF_ALL_PAIRS = 8
_NUM_RANDOM_MATCHINGS = 3
_PIECE_NUMEL = 2**17  # float32 elements: 512 KiB, the wrapper's piece size
_NUM_UNDER_WAY = 2
_NUM_SMALL_MESSAGES = 30
_NUM_LARGE_MESSAGES = 2
_NUM_CONTENDED_MESSAGES = 4

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Link:
    """The link between two ranks, as measured by one of them.

    Attributes
    ----------
    rank, peer : int
    matching : int
        The number of the matching; pairs of the same matching were measured at the same time.
    latency_s : float
        The latency of a small message from the moment at which both ranks have posted it: the lower quartile, because
        a process that has to wait for a processor says nothing about the network.
    bytes_per_s : float
        The bandwidth in each direction, while both directions are used.
    """

    rank: int
    peer: int
    matching: int
    latency_s: float
    bytes_per_s: float


def matchings(world_size: int) -> list[Pairs]:
    """Return matchings: lists of disjoint pairs of ranks that are measured at the same time.

    Up to 8 ranks these contain all pairs; with more ranks, the neighbours on a ring and three random matchings.

    Examples
    --------
    >>> matchings(4)
    [((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3))]
    """
    n = world_size
    if n < 2:
        return []
    if n <= _MAX_RANKS_OF_ALL_PAIRS:
        return _all_pairs(n)
    ring = [tuple((rank, (rank + 1) % n) for rank in range(start, n - n % 2, 2)) for start in (0, 1)]
    generator = np.random.default_rng(0)
    orders = [generator.permutation(n).tolist() for _ in range(_NUM_RANDOM_MATCHINGS)]
    return [*ring, *(tuple(zip(order[0::2], order[1::2], strict=False)) for order in orders)]


def _all_pairs(world_size: int) -> list[Pairs]:
    """Return a round-robin tournament by the circle method; with an odd number, one rank pauses in each round."""
    places = [*range(world_size), *[None] * (world_size % 2)]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        found.append(tuple(sorted((min(a, b), max(a, b)) for a, b in met if a is not None and b is not None)))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def measure_links(num_bytes: int, device: torch.device) -> list[Link]:
    """Measure the pairs of all matchings, and return the links of all ranks. Collective.

    Parameters
    ----------
    num_bytes : int
        The size of a large message. A first one is sent unmeasured, to use up the burst that an idle link lets
        through.
    device : torch.device
        The device on which the messages are.
    """
    rank = dist.get_rank()
    own = []
    for number, pairs in enumerate(matchings(dist.get_world_size())):
        peer = next((sum(pair) - rank for pair in pairs if rank in pair), None)
        dist.barrier()
        if peer is None:
            continue
        latency_s = _latency_s(peer, device)
        own.append(Link(rank, peer, number, latency_s, _bytes_per_s(peer, num_bytes, device)))
    everyone = all_gather_json([asdict(link) for link in own], "gathering what the links took", DEFAULT_TIMEOUT)
    return [Link(**link) for links in everyone for link in links]


def measure_contention(make_step: Callable[[], object], step_s: float, num_bytes: int, device: torch.device) -> float:
    """Return how long a second of computing holds up concurrent messages, in seconds, averaged over ranks. Collective.

    Pairs exchange large messages twice: once while no rank computes, and once while all ranks compute.

    Parameters
    ----------
    make_step : callable
        A function that computes for one step.
    step_s : float
        The time of such a step while nothing is sent.
    num_bytes : int
        The size of a large message.
    device : torch.device
        The device on which the messages are.
    """
    rank = dist.get_rank()
    peer = next((sum(pair) - rank for pair in matchings(dist.get_world_size())[-1] if rank in pair), None)
    message = torch.zeros(max(1, num_bytes // 4), device=device)
    received = torch.empty_like(message)
    pieces = list(zip(message.split(_PIECE_NUMEL), received.split(_PIECE_NUMEL), strict=True))

    def exchange() -> float:
        start = time.perf_counter()
        if peer is not None:
            _send(pieces * _NUM_CONTENDED_MESSAGES, peer, device)
        return time.perf_counter() - start

    dist.barrier()
    if peer is not None:
        _send(pieces, peer, device)
    alone_s = exchange()
    dist.barrier()
    sending: Future[float] = Future()

    def exchange_beside() -> None:
        sending.set_result(exchange())

    start = time.perf_counter()
    # Not a thread of an executor: a program that exits would wait for it forever.
    thread = daemon_threads.start("gossip-probe", exchange_beside, end=lambda: None, failed=sending.set_exception)
    make_step()
    num_steps = 1
    while not sending.done():
        make_step()
        num_steps += 1
    computed_s = time.perf_counter() - start
    thread.join()
    together_s = sending.result()
    steps_meanwhile = num_steps * together_s / computed_s
    own = None if peer is None else min(1.0, max(0.0, (together_s - alone_s) / (steps_meanwhile * step_s)))
    everyone = all_gather_json(own, "gathering what computing took from the links", DEFAULT_TIMEOUT)
    return statistics.fmean(factor for factor in everyone if factor is not None)


def _latency_s(peer: int, device: torch.device) -> float:
    message, received = torch.zeros(2, device=device), torch.empty(2, device=device)
    times_s = []
    for _ in range(_NUM_SMALL_MESSAGES):
        start = time.perf_counter()
        _wait(_post(message, received, peer), device)
        times_s.append(time.perf_counter() - start)
    return statistics.quantiles(times_s, n=4, method="inclusive")[0]


def _bytes_per_s(peer: int, num_bytes: int, device: torch.device) -> float:
    """Measure the bandwidth as the wrapper sends: receives first, in pieces, two of which are in flight."""
    message = torch.zeros(max(1, num_bytes // 4), device=device)
    received = torch.empty_like(message)
    pieces = list(zip(message.split(_PIECE_NUMEL), received.split(_PIECE_NUMEL), strict=True))
    _send(pieces, peer, device)
    start = time.perf_counter()
    _send(pieces * _NUM_LARGE_MESSAGES, peer, device)
    return _NUM_LARGE_MESSAGES * message.nbytes / (time.perf_counter() - start)


def _send(pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], peer: int, device: torch.device) -> None:
    under_way: list[list[dist.Work]] = []
    for piece, received in pieces:
        if len(under_way) == _NUM_UNDER_WAY:
            _wait(under_way.pop(0), device)
        under_way.append(_post(piece, received, peer))
    for works in under_way:
        _wait(works, device)


def _post(message: torch.Tensor, received: torch.Tensor, peer: int) -> list[dist.Work]:
    operations = [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, message, peer)]
    return dist.batch_isend_irecv(operations)


def _wait(works: list[dist.Work], device: torch.device) -> None:
    for work in works:
        work.wait()
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
