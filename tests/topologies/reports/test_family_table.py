"""The table of all families, and its copy in the documentation."""

from pathlib import Path

import pytest
from repository import REPOSITORY

import topologies
from topologies import Round, Topology
from topologies.__main__ import main
from topologies.reports.family_samples import samples
from topologies.reports.family_table import BEGIN, END, markdown_table, update_table

PAGE = REPOSITORY / "docs" / "topologies.md"


def test_the_page_has_the_table_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table"]) == 0
    table = capsys.readouterr().out.strip()
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    text, _, _ = rest.partition(f"\n{END}")
    assert text == table, "the table has changed; run: python -m topologies table --update docs/topologies.md"


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


def test_update_replaces_only_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main(["table", "--world-size", "4", "--update", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote the table into {path}\n"
    assert path.read_text() == f"before\n{BEGIN}\n{markdown_table(4)}\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n"])
def test_a_file_without_a_place_for_the_table_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md' has no place for the table"):
        update_table(path, "new")
    assert path.read_text() == text
