"""The page of families: complete and self-contained."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from topologies import facts_of
from topologies.__main__ import main
from topologies.drawing import gallery

FAMILIES = ("path", "random_matching", "star")
XHTML = "{http://www.w3.org/1999/xhtml}"


def test_the_command_writes_a_page_that_loads_nothing_with_a_card_for_every_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gallery, "available", lambda: FAMILIES)
    path = tmp_path / "gallery.html"
    assert main(["gallery", "--output", str(path), "--world-size", "5"]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    page = path.read_text(encoding="utf-8")
    tree = ElementTree.fromstring(page)
    cards = [card for card in tree.iter(f"{XHTML}article") if card.get("class") == "card"]
    assert tuple(card.get("id") for card in cards) == FAMILIES
    for card in cards:
        text = " ".join("".join(card.itertext()).split())
        facts = facts_of(card.get("id", ""))
        for stated in (facts.sizes, facts.degree, facts.period, facts.exact, facts.rate, facts.weights, *facts.sources):
            assert re.sub(r"`", "", stated) in text
    for element in tree.iter():
        assert element.tag.rpartition("}")[2] not in ("script", "link", "iframe", "object", "embed", "base", "metadata")
        for name, value in element.attrib.items():
            if name.rpartition("}")[2] in ("href", "src", "srcset", "data", "action"):
                assert value.startswith(("#", "data:image/svg+xml;base64,")), value
    assert set(re.findall(r"https?://[^\s\"'<>]+", page)) == {"http://www.w3.org/1999/xhtml"}
