"""A workload and a cluster for :func:`gossip.simulate_time`, measured on the ranks themselves.

Latency and bandwidth are measured between pairs of ranks, while all ranks exchange.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import networkx as nx
import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn

from gossip import Cluster, SlowRank, Workload, World
from gossip.communication.host import daemon_threads
from gossip.communication.shared_buffers import machine
from gossip.exchange.distributed_transport import PIECE_BYTES
from gossip.lab.probe.compute_probe import Loss, Optimize, PlainSteps, StepTimes
from gossip.launching import DEFAULT_TIMEOUT
from topologies.graphs.edge_colouring import edge_colouring
from topologies.matrix_storage import FloatArray

_MAX_RANKS_OF_ALL_PAIRS = 8
_MAX_NODES_OF_ALL_PAIRS = 32
_NUM_UNDER_WAY = 2
_NUM_SMALL_MESSAGES = 30
_NUM_LARGE_MESSAGES = 3
_NUM_CONTENDED_MESSAGES = 4

Pieces = list[tuple[torch.Tensor, torch.Tensor]]
"""The pieces of a message, and where those of the peer's go."""
_UNEQUAL_FACTOR = 1.5  # nodes, and a tenth of their pairs, whose bandwidths differ by less are taken for equal
_FAR_FACTOR = 4.0  # and single pairs that differ by less
_SLOW_FACTOR = 1.25  # a rank that computes longer than the median rank by this factor is a straggler


@dataclass(frozen=True)
class Link:
    """The link between two ranks, as measured by one of them; pairs of the same matching at the same time.

    The latency is that of a small message from the moment at which both ranks have posted it: the lower quartile,
    because a process that has to wait for a processor says nothing about the network. The bandwidth is that of each
    direction, while both are used.
    """

    rank: int
    peer: int
    latency_s: float
    bytes_per_s: float


def matchings(world_size: int, local_size: int = 1) -> list[list[list[int]]]:
    """Return matchings: lists of disjoint pairs of ranks that are measured at the same time.

    First those of the ranks of each node, then of nodes, whose ranks pair with those in the same place. Up to 8 ranks
    of a node, and 32 nodes, they contain all pairs; with more, the neighbours on a ring and those a third and a half of
    it away.

    Examples
    --------
    >>> matchings(4)
    [[[0, 3], [1, 2]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    >>> matchings(4, 2)
    [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    """
    places, nodes = range(local_size), range(0, world_size, local_size)
    inside = (
        [[node + place for place in pair] for node in nodes for pair in pairs]
        for pairs in _all_pairs(local_size, _MAX_RANKS_OF_ALL_PAIRS)
    )
    across = (
        [[node * local_size + place for node in pair] for pair in pairs for place in places]
        for pairs in _all_pairs(len(nodes), _MAX_NODES_OF_ALL_PAIRS)
    )
    return [*inside, *across]


def _all_pairs(n: int, most: int) -> list[list[list[int]]]:
    graph = nx.circulant_graph(n, range(1, n) if n <= most else (1, n // 3, n // 2))
    return [pairs.tolist() for pairs in edge_colouring(graph.edges)]


def gathered(content: Any, what: str) -> list[Any]:
    """Return the plain ``content`` of every rank. Collective; without a process group there is one rank."""
    with closing(World(DEFAULT_TIMEOUT)) as world:
        return world.gather_json(content, what)


def _peer_in(pairs: Sequence[Sequence[int]]) -> int | None:
    rank = dist.get_rank()
    return next((sum(pair) - rank for pair in pairs if rank in pair), None)


def measure_links(num_bytes: int, device: torch.device, local_size: int = 1) -> list[Link]:
    """Measure the pairs of all matchings with large messages of this size on a device. Collective.

    Returns the links of all ranks.
    """
    own = []
    for pairs in matchings(dist.get_world_size(), local_size):
        peer = _peer_in(pairs)
        dist.barrier()
        if peer is not None:
            message = [(torch.zeros(2, device=device), torch.empty(2, device=device))]
            times_s = [_send(message, peer, device) for _ in range(_NUM_SMALL_MESSAGES)]
            latency_s = statistics.quantiles(times_s, n=4, method="inclusive")[0]
            own.append(Link(dist.get_rank(), peer, latency_s, _bytes_per_s(peer, num_bytes, device)))
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


@dataclass(frozen=True)
class Measured:
    """The result of a measurement, which is the same on every rank.

    ``is_regular`` says whether all nodes hold the same number of consecutive ranks; if not, each rank is treated as a
    node of its own. ``coding_s`` is, by compression, the additional time to encode and mix the messages of a step
    compared with uncompressed ones: the mean over ranks; empty if it was not measured.
    """

    cluster: Cluster
    workload: Workload
    is_regular: bool
    coding_s: Mapping[str, float] = field(default_factory=dict)


def measure(
    module: nn.Module,
    loss: Loss,
    optimizer: Optimize,
    *,
    num_steps: int = 20,
    bucket_cap_mb: float = 25.0,
    message_bytes: int = 8_000_000,
) -> Measured:
    """Measure compute, jitter, latency and bandwidth. Collective; without a process group, there is one rank.

    Steps are as in :class:`.compute_probe.PlainSteps`, and at least 2 are measured; ``message_bytes`` is the size of
    the messages with which the bandwidth is measured.
    """
    if dist.is_initialized():
        dist.barrier()
    plain = PlainSteps(module, loss, optimizer, bucket_cap_mb=bucket_cap_mb)
    measured = gathered(asdict(plain.measure(num_steps)), "gathering the steps' times")
    steps = TypeAdapter(list[StepTimes]).validate_python(measured)
    workload = workload_of(steps)
    device = next(module.parameters()).device
    local_size = local_size_of(gathered(str(machine()), "telling which rank is on which machine"))
    links: list[Link] = []
    if len(steps) > 1:
        links = measure_links(message_bytes, device, local_size or 1)
        step_s = workload.compute_s + workload.mix_s
        contention = measure_contention(plain.make, step_s, message_bytes, device)
        workload = replace(workload, contention=contention)
    cluster = cluster_of(links, len(steps), local_size or 1, on_cpu=device.type == "cpu")
    coding_s = {name: statistics.fmean(times.coding_s[name] for times in steps) for name in steps[0].coding_s}
    return Measured(cluster, workload, local_size is not None, coding_s)


def workload_of(steps: Sequence[StepTimes]) -> Workload:
    """Return the mean step of the ranks that are not stragglers, with its jitter, from the times of each rank."""
    computing = [np.add(times.forward_s, times.backward_s) for times in steps]
    means = [float(durations.mean()) for durations in computing]
    usual_s = statistics.median(means)
    slow = tuple(
        SlowRank(rank, mean / usual_s) for rank, mean in enumerate(means) if usual_s and mean > _SLOW_FACTOR * usual_s
    )
    usual = [times for rank, times in enumerate(steps) if rank not in {straggler.rank for straggler in slow}]
    variances = [float(np.var(durations / durations.mean())) for durations in computing if durations.mean() > 0]
    return Workload(
        forward_s=_mean([times.forward_s for times in usual]),
        backward_s=_mean([times.backward_s for times in usual]),
        bucket_bytes=steps[0].bucket_bytes,
        update_s=_mean([times.update_s for times in usual]),
        mix_s=_mean([times.mix_s for times in usual]),
        jitter=float(np.sqrt(np.mean(variances))) if variances else 0.0,
        stragglers=slow,
    )


def _mean(times: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(itertools.chain.from_iterable(times))


def local_size_of(machines: Sequence[str]) -> int | None:
    """Return the number of ranks per machine, or None unless all hold the same number of consecutive ranks.

    Examples
    --------
    >>> local_size_of("aabb"), local_size_of("abab"), local_size_of("aab")
    (2, None, None)
    """
    sizes = [len(list(ranks)) for _, ranks in itertools.groupby(machines)]
    in_order = len(sizes) == len(set(machines))
    return sizes[0] if in_order and len(set(sizes)) == 1 else None


def cluster_of(links: Sequence[Link], world_size: int, local_size: int, *, on_cpu: bool) -> Cluster:
    """Return a cluster with medians over links; a node's bandwidth is the sum of what its ranks sent at the same time.

    Where all pairs of nodes were measured, and their bandwidths differ by half or more, it has that of each. The links
    are as measured by every rank. ``on_cpu``: where parameters are on the CPU, the ranks of a node read each other's
    memory.
    """
    across = [link for link in links if link.rank // local_size != link.peer // local_size]
    inside = [link for link in links if link.rank // local_size == link.peer // local_size]
    num_nodes = world_size // local_size
    gbps = np.zeros((num_nodes, num_nodes))
    for link in across:
        gbps[link.rank // local_size, link.peer // local_size] += 8e-9 * link.bytes_per_s
    given: dict[str, Any] = {}
    if across:
        given["latency_us"] = 1e6 * statistics.median(link.latency_s for link in across)
        measured = gbps[gbps > 0]
        given["bandwidth_gbps"] = float(np.median(measured))
        if len(measured) == num_nodes * (num_nodes - 1) and _differ(gbps):
            given["bandwidth_gbps"] = gbps.tolist()
    if inside:
        given["local_latency_us"] = 1e6 * statistics.median(link.latency_s for link in inside)
        given["local_bandwidth_gbps"] = 8e-9 * statistics.median(link.bytes_per_s for link in inside)
    return Cluster(num_nodes, local_size, shares_memory=on_cpu and local_size > 1, **given)


def _differ(gbps: FloatArray) -> bool:
    """Return whether the rates of all pairs of nodes differ by more than measurements do that are alike."""
    between = np.where(gbps > 0, gbps, np.nan)
    by_node = [np.nanmedian(between, axis) for axis in (0, 1)]
    spreads = [np.ptp(np.log(each)) for each in (np.nanquantile(between, (0.1, 0.9)), *by_node)]
    return bool(max(spreads) > math.log(_UNEQUAL_FACTOR) or np.nanmax(between) > _FAR_FACTOR * np.nanmin(between))
