"""Families of random graphs: what is drawn, from what it follows, and what is refused."""

import math
from typing import Any

import networkx as nx
import numpy as np
import pytest

import topologies
from topologies import Topology
from topologies.analysis.static_rounds import only_graph

FAMILIES: dict[str, dict[str, Any]] = {
    "random_regular": {"degree": 3},
    "erdos_renyi": {"probability": 0.3},
    "watts_strogatz": {"neighbours": 4, "probability": 0.5},
    "barabasi_albert": {"attachments": 2},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_follows_from_size_options_and_seed(name: str) -> None:
    options = FAMILIES[name]
    topology = topologies.build(name, 20, **options, seed=3)
    assert topologies.build(name, 20, **options, seed=3).round(0) == topology.round(0)
    others = [topologies.build(name, 20, **options, seed=seed).round(0) for seed in range(3)]
    assert all(other != topology.round(0) for other in others)
    # Neither the weights nor the state of any global generator has a say.
    np.random.seed(0)  # noqa: NPY002
    lazy = topologies.build(name, 20, **options, seed=3, weights="lazy")
    assert set(lazy.round(0).graph.edges) == set(topology.round(0).graph.edges)


@pytest.mark.parametrize("name", FAMILIES)
def test_schemes_are_those_of_graphs(name: str) -> None:
    graph = nx.Graph(only_graph(topologies.build(name, 12)).edges)  # fmmc leaves out edges that do not help
    for scheme in ("metropolis", "best_constant", "fmmc"):
        topology = topologies.build(name, 12, weights=scheme)
        assert topology.options["weights"] == scheme
        assert topology.round(0) == Topology.from_graph(graph, scheme).round(0)
        assert Topology.from_json(topology.to_json()) == topology
    irregular = name != "random_regular"
    assert topologies.build(name, 12, weights="uniform").stochasticity == ("row" if irregular else "doubly")
    assert topologies.build(name, 12, weights="push_sum").stochasticity == ("column" if irregular else "doubly")
    with pytest.raises(ValueError, match=r"unknown weights 'given'; available: metropolis, .* fmmc$"):
        topologies.build(name, 12, weights="given")


@pytest.mark.parametrize(("n", "degree"), [(7, 2), (64, 2), (9, 8), (34, 32), (64, 62), (20, 11), (20, 10), (21, 10)])
def test_random_regular_serves_every_degree(n: int, degree: int) -> None:
    rounds = [topologies.build("random_regular", n, degree=degree, seed=seed).round(0) for seed in (0, 1)]
    assert all(set(round_.num_sources().tolist()) == {degree} for round_ in rounds)
    assert (rounds[0] != rounds[1]) is (degree < n - 1)


@pytest.mark.parametrize(("name", "remedy"), [("random_regular", "degree, 3"), ("watts_strogatz", "neighbours, 4")])
def test_attempts_are_bounded(name: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(nx, "is_connected", lambda graph: bool(drawn.append(graph)))
    with pytest.raises(ValueError, match=rf"'{name}' drew 100 graphs from seed 0 .* raise the {remedy}$"):
        topologies.build(name, 30)
    assert len(drawn) == 100


def test_erdos_renyi_draws_again_until_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    real = nx.is_connected
    monkeypatch.setattr(nx, "is_connected", lambda graph: drawn.append(graph) or real(graph))
    topology = topologies.build("erdos_renyi", 12, probability=0.2, seed=1)
    assert len(drawn) > 1
    assert [real(graph) for graph in drawn] == [False] * (len(drawn) - 1) + [True]
    assert {frozenset(edge) for edge in drawn[-1].edges} == {frozenset(edge) for edge in only_graph(topology).edges}
    assert len({frozenset(graph.edges) for graph in drawn}) > 1


def test_erdos_renyi_has_twice_the_edges_that_connect_by_default() -> None:
    default = topologies.build("erdos_renyi", 60).options["probability"]
    assert default == pytest.approx(2 * math.log(60) / 60)


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_recorded_as_what_they_became(name: str) -> None:
    options = topologies.build(name, 9).options
    assert None not in options.values()
    assert topologies.build(name, 9, **options) == topologies.build(name, 9)
