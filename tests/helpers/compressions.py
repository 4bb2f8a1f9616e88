"""The contract table of compressions: a new one costs a row."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from exchanging import View, one_matrix

import topologies
from gossip import Cast, Choco, Compression, ModuloQuantization, PowerGossip
from gossip.compression.value_codecs import Uncompressed
from topologies import Topology


@dataclass(frozen=True)
class Row:
    """What a compression promises: ``make`` is given a seed.

    Replicas that are left alone come together to ``floor`` of their largest value within ``num_rounds`` exchanges along
    the topologies that it serves; a large bucket that was exchanged before costs ``bytes_per_value`` at most; ``views``
    says which parameters a bucket of that many values holds.
    """

    make: Callable[[int], Compression]
    floor: float
    num_rounds: int
    topologies: tuple[str, ...]
    is_random: bool
    bytes_per_value: float
    views: Callable[[int], Sequence[View] | None] = lambda _: None


def _build(name: str, world_size: int, **options: object) -> Topology:
    return topologies.build(name, world_size, **options)


TOPOLOGIES = {
    "ring": _build("ring", 5),
    "complete": _build("complete", 4),
    "directed_ring": _build("directed_ring", 3),
    "star": _build("star", 4),
    "one_peer_hypercube": _build("one_peer_hypercube", 4),
    "one_peer_exponential": _build("one_peer_exponential", 5),
    "random_matching": _build("random_matching", 5, seed=2),
    "every": _build("ring", 4).every(3),
    "then": _build("complete", 4).then(_build("one_peer_hypercube", 4), after=3),
    "alone": _build("ring", 1),
}
STATIC = ("ring", "complete", "star", "every", "alone")
ALL = tuple(TOPOLOGIES)
COMPRESSIONS = {
    "none": Row(lambda _: Uncompressed(), 2**-22, 150, ALL, is_random=False, bytes_per_value=4),
    "bf16": Row(lambda _: Cast(torch.bfloat16), 2**-7, 150, ALL, is_random=False, bytes_per_value=2),
    "fp16": Row(lambda _: Cast(torch.float16), 2**-10, 150, ALL, is_random=False, bytes_per_value=2),
    "int8": Row(lambda seed: ModuloQuantization(8, seed=seed), 2**-19, 200, ALL, is_random=True, bytes_per_value=1.01),
    "int4": Row(lambda seed: ModuloQuantization(4, seed=seed), 2**-17, 200, ALL, is_random=True, bytes_per_value=0.51),
    "choco": Row(lambda _: Choco(), 2**-9, 200, STATIC, is_random=False, bytes_per_value=0.376),
    "choco random_k": Row(
        lambda seed: Choco(sparsifier="random_k", ratio=1 / 4, seed=seed),
        2**-7,
        300,
        STATIC,
        is_random=True,
        bytes_per_value=1.01,
    ),
    "choco sign": Row(lambda _: Choco(sparsifier="sign"), 2**-7, 300, STATIC, is_random=False, bytes_per_value=0.251),
    "powergossip": Row(
        lambda seed: PowerGossip(seed=seed), 2**-7, 800, STATIC, is_random=True, bytes_per_value=0.01, views=one_matrix
    ),
}
PER_MECHANISM = ("bf16", "int8", "choco", "powergossip")
"""One of each way in which messages are made: the others differ in constants, which their codecs' contract covers."""
SERVED = [(name, topology) for name, row in COMPRESSIONS.items() for topology in row.topologies]


def in_turn(num_topologies: int) -> list[tuple[str, str]]:
    """Each compression with some of the topologies that it serves, one after the other, so that all of them occur."""
    turns = {names: itertools.cycle(names) for names in (ALL, STATIC)}
    return [
        (name, next(turns[row.topologies]))
        for name, row in COMPRESSIONS.items()
        for _ in range(min(num_topologies, len(row.topologies)))
    ]
