"""describe(): the numbers, the text and the plain data."""

import numpy as np
import pytest

import topologies
from topologies import Round, Topology, analysis


def test_the_text_is_one_aligned_page() -> None:
    text = str(topologies.build("local_global", 12, local_size=3).describe())
    assert text == "\n".join(
        [
            "topology        local_global (local_size=3)",
            "world size      12",
            "period          2 rounds",
            "measured over   one period",
            "degree          at most 3 sends and 3 receives per rank and round",
            "messages        2.5 per rank and round on average, point to point",
            "bytes           1.417 x the model per rank and round on average",
            "uniform groups  yes: every round can run as small all-reduces",
            "communicators   7 for these",
            "connected       yes",
            "diameter        2 edges",
            "stochastic      doubly, largest deviation 0.0e+00",
            "symmetric       yes",
            "SLEM            only defined for period 1",
            "spectral gap    only defined for period 1",
            "beta            0 = ||product - J||",
            "consensus rate  0 per round in the long run",
            "rounds to 1 %   2 from the worst disagreement",
            "exact after     2 rounds",
        ]
    )


def test_sends_and_receives_differ() -> None:
    # Everybody reads rank 0, which reads rank 1.
    rows = [{1: 0.5}, {0: 0.5}, {0: 0.5}, {0: 0.5}]
    found = Topology.from_rounds([Round.from_rows(rows)], stochasticity="row").describe()
    assert (found.max_sends, found.max_receives) == (3, 1)
    assert not found.connected  # nobody ever reads ranks 2 and 3
    assert found.largest_deviation == 0.0


def test_a_schedule_without_a_period_is_sampled() -> None:
    found = topologies.build("random_matching", 8).describe()
    assert (found.num_rounds, found.exact_after, found.symmetric) == (16, None, True)
    product = analysis.product(topologies.build("random_matching", 8), 16)
    assert found.beta == pytest.approx(np.linalg.norm(product - 1 / 8, 2))
    assert "measured over   the first 16 rounds" in str(found)
    assert "not promised: no period" in str(found)


def test_the_deviation_is_measured() -> None:
    round_ = Round.from_matrix([[0.5, 0.5 + 1e-11], [0.5, 0.5]])
    assert Topology.from_rounds([round_]).describe().largest_deviation == pytest.approx(1e-11, rel=1e-3)
