"""The table of all families, and its copy in the documentation."""

import pytest
from repository import REPOSITORY

import topologies
from topologies import Round, Topology
from topologies.__main__ import main
from topologies.reports.family_samples import samples

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
