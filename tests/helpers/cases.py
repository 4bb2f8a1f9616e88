"""Which topologies the distributed tests run at which world size."""

from __future__ import annotations

import functools

import networkx as nx

import topologies
from topologies import Topology

WORLD_SIZES = (1, 2, 3, 4, 5, 8)

OPTIONS = {
    "grid": ({}, {"shape": (2, 2)}),
    "hyper_cuboid": ({"factors": (2, 2)}, {"factors": (4, 2)}, {"factors": (5,)}),
    "hyper_hypercube": ({"k": 1}, {"k": 4}),
    "local_global": ({"local_size": 2}, {"local_size": 1}),
    "alternating_exp_ring": ({"local_size": 2}, {"local_size": 1}),
    "random_matching": ({"seed": 3},),
    "base": ({"k": 1}, {"k": 2}),
    "simple_base": ({"k": 1}, {"k": 2}),
    "de_bruijn": ({"p": 2}, {"p": 3}),
    "equi_static": ({"directed": True}, {"directed": False}),
    "equi_dyn": ({"directed": True}, {"directed": False}),
    "matchings": ({"graph": "star"},),
    "matcha": ({"graph": "ring"}, {"graph": "complete", "budget": 0.4}),
    "erdos_renyi": ({"probability": 0.6},),
}
"""Option values of a family; those not listed run with their defaults."""


@functools.cache
def topology_cases(world_size: int) -> dict[str, Topology]:
    """Every family that serves ``world_size``, with each of its options that do, and compositions, by name."""
    cases = {topology.name: topology for topology in compositions(world_size)}
    for name in topologies.available():
        graph = nx.relabel_nodes(nx.wheel_graph(world_size), str) if world_size > 3 else nx.path_graph(world_size)
        options = ({"graph": graph},) if name == "graph" else OPTIONS.get(name, ({},))
        for chosen in options:
            try:
                topology = topologies.build(name, world_size, **chosen)
            except ValueError:
                continue  # which sizes a family must serve is the contract of tests/topologies
            label = "" if name == "graph" else ",".join(f"{key}={value}" for key, value in chosen.items())
            cases[f"{name}({label})"] = topology
    return cases


def compositions(world_size: int) -> tuple[Topology, ...]:
    """Schedules with local steps and warm-ups: over communicators, point-to-point, and both in turn."""
    complete, ring, exponential, matching = (
        topologies.build(name, world_size) for name in ("complete", "ring", "one_peer_exponential", "random_matching")
    )
    halves = (
        () if world_size % 2 else (topologies.build("star", world_size // 2).product(topologies.build("complete", 2)),)
    )
    return (
        *halves,
        exponential.permuted(range(world_size)[::-1]),
        exponential.interleave(matching),
        exponential.every(3),
        complete.then(ring.every(2), after=4),
        matching.every(2).then(complete.then(exponential, after=2), after=5),
    )
