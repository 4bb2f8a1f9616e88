"""Social graphs: the people behind the ranks, Metropolis weights whatever the data weigh, and one size each."""

import inspect
import re
import warnings

import networkx as nx
import pytest

import topologies

GRAPHS = {
    "karate_club": nx.karate_club_graph,
    "davis": nx.davis_southern_women_graph,
    "florentine": nx.florentine_families_graph,
    "les_miserables": nx.les_miserables_graph,
}
SIZES = {"karate_club": 34, "davis": 32, "florentine": 15, "les_miserables": 77}


@pytest.mark.parametrize("name", GRAPHS)
def test_ranks_are_the_sorted_labels(name: str) -> None:
    graph = GRAPHS[name]()
    labels = sorted(graph)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the weights in the data are ignored without a word
        round_ = topologies.build(name, SIZES[name]).round(0)
    for rank, label in enumerate(labels):
        assert [labels[other] for other in round_.peers(rank)] == sorted(graph[label])


@pytest.mark.parametrize("name", GRAPHS)
def test_docstrings_state_what_is_measured(name: str) -> None:
    description = topologies.build(name, SIZES[name]).describe()
    text = inspect.getdoc(topologies.family(name)) or ""
    assert f"sizes : {SIZES[name]}\n" in text
    assert f"degree : at most {description.max_sends}, {description.mean_messages:.1f} on average" in text
    slem = float(re.search(r"SLEM (0\.\d{4})\n", text)[1])  # type: ignore[index]
    assert description.slem == pytest.approx(slem, abs=5e-5)
