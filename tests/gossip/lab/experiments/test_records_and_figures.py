"""JSON line records, and the figures of them: what is drawn, and the same bytes twice."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gossip.lab.experiments.records import JsonlWriter, cut_jsonl, read_jsonl, record_files
from gossip.lab.experiments.run_figures import draw


def make_records(num_steps: int = 30, num_ranks: int = 3) -> list[list[dict[str, Any]]]:
    """Rank r has the loss 10 / (step + 1) + r; every tenth step a consensus distance and an evaluation."""
    records: list[list[dict[str, Any]]] = []
    for rank in range(num_ranks):
        lines: list[dict[str, Any]] = []
        for step in range(num_steps):
            lines.append({"step": step, "loss": 10 / (step + 1) + rank, "accuracy": step / num_steps})
            if step % 10 == 0:
                lines[-1]["consensus_distance"] = 1e-3 * (step + 1)
                lines.append({"step": step, "test_accuracy": 0.5 + 0.1 * rank, "averaged_test_accuracy": 0.75})
        records.append(lines)
    return records


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved during the test."""
    saved: list[Figure] = []
    savefig = Figure.savefig

    def keep(self: Figure, *args: Any, **options: Any) -> None:
        saved.append(self)
        savefig(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def line_of(axes: Axes, label: str) -> np.ndarray:
    """x and y of the line with that label, [P, 2]."""
    (line,) = [line for line in axes.lines if str(line.get_label()).startswith(label)]
    return np.asarray(line.get_xydata())


def test_training_figure_draws_mean_and_range_over_ranks(tmp_path: Path, figures: list[Figure]) -> None:
    assert draw("training", make_records(), tmp_path / "training.svg")
    loss, accuracy = figures[0].axes
    steps = np.arange(30)
    np.testing.assert_allclose(line_of(loss, "training batch"), np.stack([steps, 10 / (steps + 1) + 1], axis=1))
    band = loss.collections[0].get_paths()[0].vertices
    at_step_9 = band[band[:, 0] == 9, 1]
    assert (at_step_9.min(), at_step_9.max()) == pytest.approx((1.0, 3.0))
    np.testing.assert_allclose(line_of(accuracy, "test, each replica"), [[0, 0.6], [10, 0.6], [20, 0.6]])
    np.testing.assert_allclose(line_of(accuracy, "test, averaged model"), [[0, 0.75], [10, 0.75], [20, 0.75]])
    assert len(line_of(accuracy, "training batch")) == 30


def test_training_figure_averages_long_runs_over_windows_and_says_so(tmp_path: Path, figures: list[Figure]) -> None:
    draw("training", [[{"step": step, "loss": float(step)} for step in range(250)]], tmp_path / "training.svg")
    (loss,) = figures[0].axes
    line = line_of(loss, "training batch (means over 3 records)")
    assert len(line) == math.ceil(250 / 3)
    np.testing.assert_allclose(line[:2], [[1, 1], [4, 4]])
    np.testing.assert_allclose(line[-1], [249, 249])


def test_training_figure_null_is_a_gap(tmp_path: Path, figures: list[Figure]) -> None:
    records = [
        [{"step": 0, "loss": 1.0}, {"step": 1, "loss": None}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.0}],
        [{"step": 0, "loss": 3.0}, {"step": 1, "loss": 5.0}, {"step": 2}, {"step": 3, "loss": 2.0}],
    ]
    draw("training", records, tmp_path / "training.svg")
    np.testing.assert_allclose(line_of(figures[0].axes[0], "training batch"), [[0, 2], [1, 5], [2, np.nan], [3, 2]])


def test_changes_of_ranks_are_marked(tmp_path: Path, figures: list[Figure]) -> None:
    changes = [
        {"step": 7, "before": [0, 1, 2], "members": [0, 2]},
        {"step": 20, "before": [0, 2], "members": [2, 3, 4]},
    ]
    draw("training", make_records(), tmp_path / "training.svg", changes)
    for axes in figures[0].axes:
        assert [text.get_text() for text in axes.texts] == ["without 1", "without 0; with 3, 4"]
        assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [7, 20]


@pytest.mark.parametrize(("distance", "scale"), [(2.0, "log"), (0.0, "linear")])
def test_consensus_figure_of_one_step_shows_both_distances_as_points(
    tmp_path: Path, figures: list[Figure], distance: float, scale: str
) -> None:
    records = [[{"step": 0, "consensus_distance": distance, "consensus_distance_relative": 0.5}]]
    draw("consensus", records, tmp_path / "consensus.svg")
    absolute, relative = (line_of(axes, "between replicas") for axes in figures[0].axes)
    np.testing.assert_allclose(absolute, [[0, distance]])
    np.testing.assert_allclose(relative, [[0, 0.5]])
    assert figures[0].axes[0].get_yscale() == scale
    assert all(line.get_marker() == "o" for axes in figures[0].axes for line in axes.lines)


def test_figures_have_the_same_bytes_twice(tmp_path: Path) -> None:
    for path in (first := tmp_path / "a.svg", second := tmp_path / "b.svg"):
        draw("training", make_records(), path)
    assert first.read_bytes() == second.read_bytes()
    assert b"<dc:date>" not in first.read_bytes()


def test_figures_of_empty_records_are_left_out(tmp_path: Path) -> None:
    for records in ([[{"step": 0, "consensus_distance": 0.5}], []], [[{"step": 0, "loss": None}]], []):
        assert not draw("training", records, tmp_path / "training.svg")
    assert not list(tmp_path.iterdir())


def test_records_round_trip_and_append(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "rank0.jsonl"
    first = {"step": 0, "loss": 0.1 + 0.2, "note": "é\n", "peers": [1, 2], "final": False, "nothing": None}
    with JsonlWriter(path) as writer:
        writer.write(first)
    with JsonlWriter(path) as writer:
        writer.write({"step": 1, "loss": 1e-300})
    assert read_jsonl(path) == [first, {"step": 1, "loss": 1e-300}]
    assert len(path.read_bytes().splitlines()) == 2


def test_records_write_what_is_not_finite_as_null(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    with JsonlWriter(path) as writer:
        writer.write({"step": 3, "loss": math.nan, "nested": {"values": [-math.inf, 1.0]}})
    strict = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert strict == {"step": 3, "loss": None, "nested": {"values": [None, 1.0]}}


def test_records_are_cut_back_to_a_step_and_to_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    assert len(read_jsonl(path)) == 3
    with JsonlWriter(path) as writer:
        writer.write({"step": 3})
    assert [record["step"] for record in read_jsonl(path)] == [0, 1, 2, 3]
    cut_jsonl(path, 2)
    assert path.read_text() == '{"step": 0}\n{"step": 1}\n'
    cut_jsonl(path, 0)
    assert path.read_text() == ""
    cut_jsonl(tmp_path / "none.jsonl", 3)  # there is none


@pytest.mark.parametrize(("line", "message"), [("{oops}", "line 2: not JSON"), ("[1]", "line 2: a record must be")])
def test_records_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 1}}\n')
    with pytest.raises(ValueError, match=rf"rank0\.jsonl, {message}"):
        read_jsonl(path)


def test_record_files_are_those_that_ranks_write_in_their_order(tmp_path: Path) -> None:
    for name in ("rank10", "rank2", "workers", "rank2_copy", "ranking"):
        (tmp_path / f"{name}.jsonl").touch()
    assert [path.stem for path in record_files(tmp_path)] == ["workers", "rank2", "rank10"]
