"""The page of all families: complete, self-contained, and in a browser without overlap at any width."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import topologies
from topologies import facts_of
from topologies.__main__ import main
from topologies.drawing import gallery
from topologies.drawing.gallery import gallery_page

pytestmark = pytest.mark.xdist_group("gallery")  # what its fixtures make is made once

WORLD_SIZE = 12
XHTML = "{http://www.w3.org/1999/xhtml}"


@pytest.fixture(scope="module")
def page() -> str:
    return gallery_page(WORLD_SIZE)


@pytest.fixture(scope="module")
def tree(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page)


@pytest.mark.slow
def test_there_is_one_card_for_every_family(tree: ElementTree.Element) -> None:
    cards = [card for card in tree.iter(f"{XHTML}article") if card.get("class") == "card"]
    assert [card.get("id") for card in cards] == list(topologies.available())
    for card in cards:
        text = " ".join("".join(card.itertext()).split())
        facts = facts_of(card.get("id", ""))
        for stated in (facts.sizes, facts.degree, facts.period, facts.exact, facts.rate, facts.weights, *facts.sources):
            assert re.sub(r"`", "", stated) in text
        assert len(list(card.iter(f"{XHTML}img"))) == 1


@pytest.mark.slow
def test_nothing_is_loaded_and_nothing_runs(page: str, tree: ElementTree.Element) -> None:
    for element in tree.iter():
        tag = element.tag.rpartition("}")[2]
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "metadata")
        for name, value in element.attrib.items():
            attribute = name.rpartition("}")[2]
            assert not attribute.startswith("on")
            if attribute in ("href", "src", "srcset", "data", "action"):
                assert value.startswith(("#", "data:image/svg+xml;base64,")), value
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*[\"']?([^)]*)", page))
    assert "@import" not in page
    assert set(re.findall(r"https?://[^\s\"'<>]+", page)) == {"http://www.w3.org/1999/xhtml"}


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gallery, "available", lambda: ("path", "star"))
    path = tmp_path / "gallery.html"
    assert main(["gallery", "--output", str(path), "--world-size", "5"]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert path.read_text(encoding="utf-8") == gallery_page(5)
