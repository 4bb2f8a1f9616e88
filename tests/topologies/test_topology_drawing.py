"""draw(): files that are right and the same every time."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import topologies
from topologies import Round, Topology, draw


def texts(path: Path) -> str:
    # matplotlib draws glyphs as paths and leaves the text in comments
    ElementTree.parse(path)
    return path.read_text()


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("ring", 1, {}),
        ("complete", 2, {}),
        ("one_peer_exponential", 6, {}),
        ("alternating_exp_ring", 8, {"local_size": 2}),
        ("exponential", 64, {}),
        ("random_matching", 5, {}),
    ],
)
def test_svg_is_the_same_every_time(name: str, world_size: int, options: dict[str, int], tmp_path: Path) -> None:
    topology = topologies.build(name, world_size, **options)
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    draw(topology, one)
    draw(Topology.from_json(topology.to_json()), other)
    assert one.read_bytes() == other.read_bytes()
    text = texts(one)
    assert f"<!-- {name}, {world_size} rank" in text
    assert "<dc:date>" not in text
    for t in range(min(topology.period or 4, 8)):
        assert f"<!-- round {t}: " in text


def test_captions(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    uneven = Round.from_matrix([[0.5, 0.3, 0.2], [0.4, 0.5, 0.1], [0.1, 0.2, 0.7]])
    shift = Round.from_rows([{(i + 1) % 3: 0.25} for i in range(3)])
    rounds = [Round.identity(3), Round.from_groups(3, [(0, 2)]), uneven, shift]
    draw(Topology.from_rounds(rounds), path)
    text = texts(path)
    for caption in ("nothing is sent", "groups of 2", "weights 0.1 to 0.4", "weights 0.25"):
        assert caption in text


def test_rounds_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    topology = topologies.build("one_peer_exponential", 16)
    draw(topology, path, rounds=2)
    text = texts(path)
    assert "first 2 of 4 rounds" in text
    assert "round 2:" not in text
    draw(topology, path, rounds=5)
    assert "<!-- round 4: " in texts(path)


def test_png(tmp_path: Path) -> None:
    path = tmp_path / "picture.PNG"
    draw(topologies.build("ring", 4), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "rounds", "message"),
    [("ring.pdf", None, r"must end in \.svg or \.png, got 'ring\.pdf'"), ("ring.svg", 0, "rounds must be at least 1")],
)
def test_refusals(path: str, rounds: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(topologies.build("ring", 4), path, rounds)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 128 ranks, the topology has 300"):
        draw(topologies.build("ring", 300), "ring.svg")


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "gossip-training\[plot\]"'):
        draw(topologies.build("ring", 4), "ring.svg")


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    code = f"""
import sys, topologies
topologies.draw(topologies.build("ring", 4), {str(tmp_path / "ring.svg")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
