"""Every family's docstring says what it must, what it says of rates is true, and the table of all is today's."""

import inspect
import math
import re

import numpy as np
import pytest
from contracts import tau
from repository import REPOSITORY

import topologies
from topologies import Facts, Round, Topology, facts_of
from topologies.__main__ import main
from topologies.analysis import beta, slem
from topologies.reports.family_samples import PROPERTIES, samples

DOCSTRING = inspect.getdoc(topologies.family("complete")) or ""


def register(docstring: str) -> None:
    def everybody(world_size: int) -> Topology:
        return topologies.build("complete", world_size)

    everybody.__doc__ = docstring
    topologies.register("all")(everybody)


@pytest.mark.parametrize("name", topologies.available())
def test_every_family_states_its_facts(name: str) -> None:
    facts = facts_of(name)
    assert all(len(getattr(facts, key)) < 120 for key in PROPERTIES)
    assert any(re.search(r"\b(19|20)\d\d\b", source) for source in facts.sources), "no year"
    assert all(source.endswith(".") and '"' in source for source in facts.sources)
    function = topologies.family(name)
    for option in list(inspect.signature(function).parameters)[1:]:
        documented = inspect.getdoc(function).split("Parameters\n", 1)[1]
        assert re.search(rf"^{option}\b", documented, re.MULTILINE), option


@pytest.mark.usefixtures("own_families")
def test_a_docstring_becomes_facts() -> None:
    register(DOCSTRING.replace("algorithms for clusters", "algorithms\nfor clusters").replace("1/n,", "1/n :"))
    assert facts_of("all") == Facts(
        name="all",
        summary="Everybody with everybody: all ranks average, as all-reduce does.",
        definition=("One group of all n ranks: ``W = J``, every entry 1/n.",),
        sizes="any n",
        degree="n - 1",
        period="1",
        exact="after 1 round",
        rate="SLEM 0",
        weights="1/n : symmetric, one uniform group",
        sources=('Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.',),
        example='>>> topologies.build("complete", 4).round(0).groups\n((0, 1, 2, 3),)',
    )


@pytest.mark.usefixtures("own_families")
@pytest.mark.parametrize(
    ("text", "replacement", "key"),
    [
        ("Everybody with everybody", "Everybody " + 130 * "x", "summary"),
        ("One group of all n ranks: ``W = J``, every entry 1/n.\n\n", "", "definition"),
        ("degree : ", "degree is ", "degree"),
        ("rate : SLEM 0", "rate : ", "rate"),
        ("References\n-", "Sources\n-", "References"),
        (">>> ", "", "Examples"),
        ("sizes : any n", "sizes : any n\nspeed : high", "speed"),
    ],
)
def test_what_is_missing_is_named(text: str, replacement: str, key: str) -> None:
    assert text in DOCSTRING
    register(DOCSTRING.replace(text, replacement))
    with pytest.raises(ValueError, match=rf"family 'all' (has|lacks) .*\b{key}\b"):
        facts_of("all")


def test_one_peer_rates_over_a_period() -> None:
    assert facts_of("one_peer_ring").rate.startswith("beta cos(2 pi / n)")
    stated = "beta max over 0 < k < n of abs(sin(2^tau pi k / n)) / (2^tau sin(pi k / n))"
    assert facts_of("one_peer_exponential").rate.startswith(stated)
    for n in range(3, 34):
        power, angles = 2 ** tau(n), np.pi * np.arange(1, n) / n
        largest = (np.abs(np.sin(power * angles)) / (power * np.sin(angles))).max()
        assert beta(topologies.build("one_peer_exponential", n)) == pytest.approx(largest, abs=1e-12)
        if n % 2 == 0:
            assert beta(topologies.build("one_peer_ring", n)) == pytest.approx(math.cos(2 * math.pi / n), abs=1e-12)


def test_measured_rates() -> None:
    assert "SLEM 0.869 on 4 x 4" in facts_of("grid").rate
    assert topologies.build("grid", 16).describe().slem == pytest.approx(0.869, abs=5e-4)
    assert "SLEM 1/2 for n = 16" in facts_of("undirected_exponential").rate
    assert topologies.build("undirected_exponential", 16).describe().slem == pytest.approx(0.5, abs=1e-12)


def test_a_random_matching_contracts_as_stated() -> None:
    assert "(n - 2) / (2 (n - 1)) in a round for even n, 1/2 for odd n" in facts_of("random_matching").rate
    # W is a projection, so the expected squared distance is a quadratic form of the mean of W.
    mean = np.mean([topologies.build("random_matching", 6).round(t).matrix() for t in range(2000)], axis=0)
    assert slem((mean + mean.T) / 2) == pytest.approx(4 / 10, abs=0.03)


PAGE = REPOSITORY / "docs" / "topologies.md"
BEGIN, END = "<!-- python -m topologies table -->", "<!-- end of python -m topologies table -->"


def test_the_page_has_the_table_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table"]) == 0
    table = capsys.readouterr().out.strip()
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    text, _, _ = rest.partition(f"\n{END}")
    assert text == table, "the table has changed; put the output of python -m topologies table into docs/topologies.md"


def test_samples_take_the_nearest_size_and_drop_repetitions() -> None:
    assert [topology.world_size for topology in samples("one_peer_hypercube", 12)] == [8]
    assert [topology.world_size for topology in samples("one_peer_hypercube", 13)] == [16]
    assert [topology.options["k"] for topology in samples("hyper_hypercube", 16)] == [1, 3]
    assert samples("ring", 7) == [topologies.build("ring", 7)]


@pytest.mark.usefixtures("own_families")
def test_a_family_without_a_size_is_refused() -> None:
    @topologies.register("picky")
    def picky(world_size: int, *, choice: str) -> Topology:  # noqa: ARG001
        return Topology.from_rounds([Round.identity(world_size)])

    with pytest.raises(ValueError, match="no variant of family 'picky' serves"):
        samples("picky", 4)
