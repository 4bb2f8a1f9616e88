"""draw(): files that are right and the same every time; the page of families, which loads nothing."""

import itertools
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import networkx as nx
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import topologies
from topologies import Round, Topology, draw
from topologies.drawing import layout_of, picture_files, round_pictures, topology_pictures
from topologies.drawing.topology_pictures import draw_matrix


def texts(path: Path) -> str:
    # matplotlib draws glyphs as paths and leaves the text in comments
    ElementTree.parse(path)
    return path.read_text()


@pytest.mark.parametrize(("name", "world_size"), [("ring", 1), ("one_peer_exponential", 6), ("random_matching", 5)])
def test_svg_is_the_same_every_time(name: str, world_size: int, tmp_path: Path) -> None:
    topology = topologies.build(name, world_size)
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    draw(topology, one)
    draw(Topology.from_json(topology.to_json()), other)
    assert one.read_bytes() == other.read_bytes()
    text = texts(one)
    assert f"<!-- {name}" in text
    assert f"<!-- {world_size} rank" in text
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


def test_of_many_ranks_there_are_only_matrices_and_the_curve(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    draw(topologies.build("one_peer_hypercube", 128), path, rounds=2)
    text = texts(path)
    for caption in ("W of round 0", "W of round 1", "product of the period", "exact after 7 rounds"):
        assert f"<!-- {caption} -->" in text
    assert "W of round 2" not in text
    assert "<!-- round 0:" not in text


def shown(topology: Topology, tmp_path: Path) -> list[str]:
    draw(topology, tmp_path / "picture.svg")
    return re.findall("<!-- (.*) -->", texts(tmp_path / "picture.svg"))


def test_exactness_is_marked_only_where_it_is(tmp_path: Path) -> None:
    assert "exact after 1 round" in shown(topologies.build("complete", 9), tmp_path)
    assert "exact after 12 rounds" in shown(topologies.build("one_peer_hypercube", 8).every(4), tmp_path)
    assert not any("exact after" in text for text in shown(topologies.build("ring", 9), tmp_path))
    all_reduce_first = topologies.build("complete", 8).then(topologies.build("ring", 8), after=3)
    assert not any("exact after" in text for text in shown(all_reduce_first, tmp_path))
    # 0.001^k falls below rounding, but is never 0.
    quick = Topology.from_rounds([Round.from_matrix([[0.5005, 0.4995], [0.4995, 0.5005]])])
    texts_of_quick = shown(quick, tmp_path)
    assert any(text.startswith("below 1e-12 after ") for text in texts_of_quick)
    assert not any("exact" in text for text in texts_of_quick)
    assert "exact from the start" in shown(topologies.build("ring", 1), tmp_path)


def test_negative_weights_are_dashed_and_the_colours_diverge(tmp_path: Path) -> None:
    matrix = [[0.6, 0.6, -0.2], [0.6, 0.2, 0.2], [-0.2, 0.2, 1.0]]
    negative = shown(Topology.from_rounds([Round.from_matrix(matrix)]), tmp_path)
    assert any("dashed: negative" in text for text in negative)
    assert "stroke-dasharray: " in (tmp_path / "picture.svg").read_text().partition("matplotlib.axis")[0]
    assert "-1" in negative  # the scale goes below 0
    figure = Figure()
    draw_matrix(figure.add_subplot(), np.array(matrix), "W")
    assert figure.axes[0].images[0].get_clim() == (-1, 1)
    red, _, blue, _ = figure.axes[0].images[0].to_rgba([[-0.2]])[0, 0]
    assert red > blue
    positive = shown(topologies.build("ring", 3), tmp_path)
    assert not any("dashed" in text for text in positive)
    assert "stroke-dasharray: " not in (tmp_path / "picture.svg").read_text().partition("matplotlib.axis")[0]


WHOLE = [
    topologies.build("ring", 1),
    topologies.build("star", 16),
    topologies.build("grid", 33),
    topologies.build("torus", 64),
    topologies.build("alternating_exp_ring", 16, local_size=4),
    topologies.build("random_matching", 5).every(3),
    topologies.build("complete", 8).then(topologies.build("ring", 8).every(1000), after=100_000),
    topologies.build("graph", 10, graph=nx.petersen_graph(), weights="lazy"),
    topologies.build("ring", 200),
    Topology.from_rounds([Round.from_matrix(np.full((3, 3), 1 / 3))], name=30 * "a_long_name_" + "."),
]


PICTURES = [(topology, False) for topology in WHOLE] + [(topology, True) for topology in WHOLE[:3]]


@pytest.mark.parametrize(
    ("topology", "compact"), PICTURES, ids=[f"{t.name[:40]}-{t.world_size}{compact:d}" for t, compact in PICTURES]
)
def test_nothing_overlaps_or_is_cut(topology: Topology, compact: bool) -> None:
    with picture_files.settings("path"):
        if compact:
            figure = topology_pictures._compact_figure(topology)
        else:
            figure = topology_pictures._whole_figure(topology, topology_pictures._exchanges(topology, 8))
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
        boxes += [text.get_window_extent(renderer) for text in figure.texts]
    for number, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0, number
        assert box.x1 <= figure.bbox.x1 + 0.5, number
        assert figure.bbox.y0 <= box.y0 + 0.5, number
        assert box.y1 <= figure.bbox.y1, number
    for one, other in itertools.combinations(boxes, 2):
        width = min(one.x1, other.x1) - max(one.x0, other.x0)
        height = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(width, height) <= 1.0, (one, other)  # a pixel


def test_settings_of_the_user_change_nothing(tmp_path: Path) -> None:
    before, after = tmp_path / "before.svg", tmp_path / "after.svg"
    topology = topologies.build("ring", 5)
    draw(topology, before)
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "savefig.bbox": "tight"}):
        draw(topology, after)
        assert matplotlib.rcParams["font.size"] == 30
    assert before.read_bytes() == after.read_bytes()


@pytest.mark.parametrize("topology", [t for t in WHOLE if 1 < t.world_size <= 80], ids=str)
def test_ranks_stand_apart_inside_the_panel(topology: Topology) -> None:
    layout = layout_of(topology)
    assert layout.places.shape == (topology.world_size, 2)
    assert np.abs(layout.places).max() + layout.radius <= round_pictures.EXTENT
    lengths = np.linalg.norm(layout.places[:, None] - layout.places, axis=2)
    assert lengths[~np.eye(topology.world_size, dtype=bool)].min() > 2 * layout.radius


def test_layouts_of_families() -> None:
    star = layout_of(topologies.build("star", 9)).places
    np.testing.assert_allclose(star[0], 0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(star[1:], axis=1), 1)
    grid = layout_of(topologies.build("grid", 12, shape=(3, 4))).places
    assert grid[5][0] == pytest.approx(grid[1][0])  # one row further down
    assert grid[5][1] < grid[1][1]
    ring = layout_of(topologies.build("ring", 8)).places
    np.testing.assert_allclose(ring[0], [0, 1], atol=1e-12)
    np.testing.assert_allclose(ring[2], [1, 0], atol=1e-12)  # clockwise
    path = layout_of(topologies.build("path", 8)).places
    assert np.linalg.norm(path[0] - path[7]) > 1.2 * np.linalg.norm(path[0] - path[1])
    nodes = layout_of(topologies.build("local_global", 8, local_size=4)).places
    assert np.linalg.norm(nodes[3] - nodes[4]) > 1.2 * np.linalg.norm(nodes[2] - nodes[3])


def test_a_torus_is_cut_at_its_border() -> None:
    layout = layout_of(topologies.build("torus", 12, shape=(3, 4)))
    up, left = layout.way_out(1, 9), layout.way_out(4, 7)
    assert up.real == 0 < up.imag
    assert left.real < 0
    assert layout.way_out(0, 1) is None
    assert layout.way_out(0, 5) is None
    assert layout_of(topologies.build("grid", 12)).way_out(0, 3) is None


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"clone.*pip install '\.\[plot\]'"):
        draw(topologies.build("ring", 4), "ring.svg")
