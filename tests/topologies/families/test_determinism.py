"""Every rank computes the same rounds: no hash seed and no earlier round matters."""

import os
import subprocess
import sys

import pytest

import topologies

# Nodes with string labels, given as a set: its order depends on PYTHONHASHSEED.
CODE = """
import json, networkx, topologies
from topologies.reports.family_samples import samples
graph = networkx.Graph()
graph.add_nodes_from({f"rank {i}" for i in range(12)})
graph.add_edges_from({(f"rank {i}", f"rank {(i + hop) % 12}") for i in range(12) for hop in (1, 5)})
families = [topology for name in topologies.available() for topology in samples(name, 12)]
graphs = [topologies.build(name, 12, graph=graph) for name in ("graph", "matchings", "matcha")]
for topology in (*families, *graphs):
    print(topology.to_json())
    for t in (1000, 0, 1, 2):
        print(json.dumps(topology.round(t).to_dict()))
for weights in ("best_constant", "fdla", "fmmc"):
    print(topologies.build("graph", 12, graph=graph, weights=weights).round(0).to_dict())
"""


def output(hash_seed: str) -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_rounds_do_not_depend_on_the_hash_seed(capsys: pytest.CaptureFixture[str]) -> None:
    exec(CODE, {})  # with the seed of this process, which is another one in every run
    first = capsys.readouterr().out
    assert all(f'"{name}"' in first for name in topologies.available())
    assert output("1") == output("4321") == first


def test_a_seed_names_one_schedule() -> None:
    """Frozen: a change here changes what a seed means, and every run that is to be reproduced."""
    topology = topologies.build("random_matching", 6, seed=0)
    assert [topology.round(t).groups for t in (0, 1, 1000)] == [
        ((0, 1), (2, 3), (4, 5)),
        ((0, 3), (1, 4), (2, 5)),
        ((0, 3), (1, 2), (4, 5)),
    ]
    undirected = topologies.build("equi_dyn", 8, seed=0)
    directed = topologies.build("equi_dyn", 8, seed=0, directed=True)
    assert [undirected.round(t).groups for t in (0, 1000)] == [
        ((0, 2), (1, 7), (3, 5), (4, 6)),
        ((0, 5), (1,), (2,), (3, 6), (4, 7)),
    ]
    assert [list(directed.round(t).neighbours(0)) for t in (0, 1, 2, 1000)] == [[6], [4], [7], [3]]
    assert list(topologies.build("equi_static", 64, directed=True).round(0).neighbours(0)) == [3, 17, 20, 33, 41, 54]
