"""Measurement of latency and bandwidth between pairs of ranks, while all ranks exchange."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist

from gossip import World
from gossip.communication.host import daemon_threads
from gossip.exchange.distributed_transport import PIECE_BYTES
from gossip.launching import DEFAULT_TIMEOUT
from topologies.graphs.edge_colouring import edge_colouring

_MAX_RANKS_OF_ALL_PAIRS = 8
_NUM_UNDER_WAY = 2
_NUM_SMALL_MESSAGES = 30
_NUM_LARGE_MESSAGES = 3
_NUM_CONTENDED_MESSAGES = 4

Pieces = list[tuple[torch.Tensor, torch.Tensor]]
"""The pieces of a message, and where those of the peer's go."""


@dataclass(frozen=True)
class Link:
    """The link between two ranks, as measured by one of them; pairs of the same matching at the same time.

    The latency is that of a small message from the moment at which both ranks have posted it: the lower quartile,
    because a process that has to wait for a processor says nothing about the network. The bandwidth is that of each
    direction, while both are used.
    """

    rank: int
    peer: int
    matching: int
    latency_s: float
    bytes_per_s: float


def matchings(world_size: int) -> list[list[list[int]]]:
    """Return matchings: lists of disjoint pairs of ranks that are measured at the same time.

    Up to 8 ranks these contain all pairs; with more ranks, the neighbours on a ring and those a third and a half of it
    away.

    Examples
    --------
    >>> matchings(4)
    [[[0, 3], [1, 2]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    """
    n = world_size
    graph = nx.circulant_graph(n, range(1, n) if n <= _MAX_RANKS_OF_ALL_PAIRS else (1, n // 3, n // 2))
    return [pairs.tolist() for pairs in edge_colouring(graph.edges)]


def gathered(content: Any, what: str) -> list[Any]:
    """Return the plain ``content`` of every rank. Collective; without a process group there is one rank."""
    with closing(World(DEFAULT_TIMEOUT)) as world:
        return world.gather_json(content, what)


def _peer_in(pairs: Sequence[Sequence[int]]) -> int | None:
    rank = dist.get_rank()
    return next((sum(pair) - rank for pair in pairs if rank in pair), None)


def measure_links(num_bytes: int, device: torch.device) -> list[Link]:
    """Measure the pairs of all matchings with large messages of this size on a device. Collective.

    Returns the links of all ranks.
    """
    own = []
    for number, pairs in enumerate(matchings(dist.get_world_size())):
        peer = _peer_in(pairs)
        dist.barrier()
        if peer is not None:
            message = [(torch.zeros(2, device=device), torch.empty(2, device=device))]
            times_s = [_send(message, peer, device) for _ in range(_NUM_SMALL_MESSAGES)]
            latency_s = statistics.quantiles(times_s, n=4, method="inclusive")[0]
            own.append(Link(dist.get_rank(), peer, number, latency_s, _bytes_per_s(peer, num_bytes, device)))
    everyone = gathered([asdict(link) for link in own], "gathering what the links took")
    return [Link(**link) for links in everyone for link in links]


def measure_contention(make_step: Callable[[], object], step_s: float, num_bytes: int, device: torch.device) -> float:
    """Return how long a second of computing holds up concurrent messages, in seconds, averaged over ranks. Collective.

    Pairs exchange large messages of this size twice: once while no rank computes, and once while all ranks compute by
    ``make_step``, which takes ``step_s`` while nothing is sent.
    """
    peer, pieces = _peer_in(matchings(dist.get_world_size())[-1]), _pieces(num_bytes, device)

    def exchange() -> float:
        return 0.0 if peer is None else _send(pieces * _NUM_CONTENDED_MESSAGES, peer, device)

    dist.barrier()
    if peer is not None:
        _send(pieces, peer, device)
    alone_s = exchange()
    dist.barrier()
    sending: Future[float] = Future()
    start = time.perf_counter()
    # Not a thread of an executor: a program that exits would wait for it forever.
    thread = daemon_threads.start(
        "gossip-probe", lambda: sending.set_result(exchange()), end=lambda: None, failed=sending.set_exception
    )
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
    everyone = gathered(own, "gathering what computing took from the links")
    return statistics.fmean(factor for factor in everyone if factor is not None)


def _bytes_per_s(peer: int, num_bytes: int, device: torch.device) -> float:
    """Measure the bandwidth as the wrapper sends: receives first, in pieces, two of which are in flight."""
    pieces = _pieces(num_bytes, device)
    _send(pieces, peer, device)  # uses up the burst that an idle link lets through
    # Another program's turn of the processor, or a segment that is sent again, says nothing about the link.
    usual_s = statistics.median(_send(pieces, peer, device) for _ in range(_NUM_LARGE_MESSAGES))
    return sum(piece.nbytes for piece, _ in pieces) / usual_s


def _pieces(num_bytes: int, device: torch.device) -> Pieces:
    message, numel = torch.zeros(max(1, num_bytes // 4), device=device), PIECE_BYTES // 4
    return list(zip(message.split(numel), torch.empty_like(message).split(numel), strict=True))


def _send(pieces: Pieces, peer: int, device: torch.device) -> float:
    """Exchange the pieces with a peer, and return the time in seconds."""
    start = time.perf_counter()
    under_way: list[list[dist.Work]] = []
    for piece, received in pieces:
        if len(under_way) == _NUM_UNDER_WAY:
            _wait(under_way.pop(0), device)
        operations = [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, piece, peer)]
        under_way.append(dist.batch_isend_irecv(operations))
    for works in under_way:
        _wait(works, device)
    return time.perf_counter() - start


def _wait(works: list[dist.Work], device: torch.device) -> None:
    for work in works:
        work.wait()
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
