"""The figures: what is drawn, files of every format, the same bytes twice, refusals, no pyplot."""

from __future__ import annotations

import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gossip.lab.experiments.run_figures import consensus_figure, training_figure


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
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved during the test."""
    figures: list[Figure] = []
    savefig = Figure.savefig

    def keep(self: Figure, *args: Any, **options: Any) -> None:
        figures.append(self)
        savefig(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def line_of(axes: Axes, label: str) -> np.ndarray:
    """x and y of the line with that label, [P, 2]."""
    (line,) = [line for line in axes.lines if str(line.get_label()).startswith(label)]
    return np.asarray(line.get_xydata())


def test_training_figure_draws_mean_and_range_over_ranks(tmp_path: Path, drawn: list[Figure]) -> None:
    training_figure(make_records(), tmp_path / "training.svg")
    loss, accuracy = drawn[0].axes
    steps = np.arange(30)
    np.testing.assert_allclose(line_of(loss, "training batch"), np.stack([steps, 10 / (steps + 1) + 1], axis=1))
    band = loss.collections[0].get_paths()[0].vertices
    at_step_9 = band[band[:, 0] == 9, 1]
    assert (at_step_9.min(), at_step_9.max()) == pytest.approx((1.0, 3.0))
    np.testing.assert_allclose(line_of(accuracy, "test, each replica"), [[0, 0.6], [10, 0.6], [20, 0.6]])
    np.testing.assert_allclose(line_of(accuracy, "test, averaged model"), [[0, 0.75], [10, 0.75], [20, 0.75]])
    assert len(line_of(accuracy, "training batch")) == 30


def test_training_figure_averages_long_runs_over_windows_and_says_so(tmp_path: Path, drawn: list[Figure]) -> None:
    records = [[{"step": step, "loss": float(step)} for step in range(250)]]
    training_figure(records, tmp_path / "training.svg")
    (loss,) = drawn[0].axes
    line = line_of(loss, "training batch")
    assert len(line) == math.ceil(250 / 3)
    np.testing.assert_allclose(line[:2], [[1, 1], [4, 4]])
    np.testing.assert_allclose(line[-1], [249, 249])
    assert "windows of 3 records" in loss.get_xlabel()


def test_training_figure_null_is_a_gap(tmp_path: Path, drawn: list[Figure]) -> None:
    records = [
        [{"step": 0, "loss": 1.0}, {"step": 1, "loss": None}, {"step": 2, "loss": None}, {"step": 3, "loss": 2.0}],
        [{"step": 0, "loss": 3.0}, {"step": 1, "loss": 5.0}, {"step": 2}, {"step": 3, "loss": 2.0}],
    ]
    training_figure(records, tmp_path / "training.svg")
    np.testing.assert_allclose(line_of(drawn[0].axes[0], "training batch"), [[0, 2], [1, 5], [2, np.nan], [3, 2]])


@pytest.mark.parametrize("draw", [training_figure, consensus_figure])
def test_changes_of_ranks_are_marked(tmp_path: Path, drawn: list[Figure], draw: Any) -> None:
    changes = [
        {"step": 7, "before": [0, 1, 2], "members": [0, 2]},
        {"step": 20, "before": [0, 2], "members": [2, 3, 4]},
    ]
    draw(make_records(), tmp_path / "figure.svg", changes)
    for axes in drawn[0].axes:
        assert [text.get_text() for text in axes.texts] == ["without 1", "without 0; with 3, 4"]
        marks = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]
        assert marks == [7, 20]


@pytest.mark.parametrize(("distance", "scale"), [(2.0, "log"), (0.0, "linear")])
def test_consensus_figure_has_the_relative_distance_beside_the_absolute_one(
    tmp_path: Path, drawn: list[Figure], distance: float, scale: str
) -> None:
    records = [[{"step": 0, "consensus_distance": distance, "consensus_distance_relative": 0.5}]]
    consensus_figure(records, tmp_path / "consensus.svg")
    absolute, relative = (line_of(axes, "consensus") for axes in drawn[0].axes)
    np.testing.assert_allclose(absolute, [[0, distance]])
    np.testing.assert_allclose(relative, [[0, 0.5]])
    assert drawn[0].axes[0].get_yscale() == scale


@pytest.mark.parametrize("draw", [training_figure, consensus_figure])
def test_figure_of_one_step_shows_a_point(tmp_path: Path, drawn: list[Figure], draw: Any) -> None:
    draw(make_records(num_steps=1, num_ranks=1), tmp_path / "figure.svg")
    assert all(line.get_marker() in ("o", "s") for axes in drawn[0].axes for line in axes.lines)


@pytest.mark.parametrize("draw", [training_figure, consensus_figure])
@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_figure_format_follows_the_ending_and_bytes_are_the_same_twice(
    tmp_path: Path, draw: Any, ending: str, start: bytes
) -> None:
    paths = [tmp_path / "folder" / f"{name}.{ending}" for name in "ab"]
    assert [draw(make_records(), path) for path in paths] == paths
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith(start)
    assert b"<dc:date>" not in first
    assert b"CreationDate" not in first
    if ending == "svg":
        assert ElementTree.fromstring(first).tag.endswith("svg")


def test_figures_of_empty_records_are_refused(tmp_path: Path) -> None:
    for records in ([[{"step": 0, "test_accuracy": 0.5}], []], [[{"step": 0, "loss": None}]], []):
        with pytest.raises(ValueError, match=r"no number under 'loss'.*training\.svg would be empty"):
            training_figure(records, tmp_path / "training.svg")
    with pytest.raises(ValueError, match=r"no number under 'consensus_distance'.*leave this figure out"):
        consensus_figure([[{"step": 0, "loss": 0.5}]], tmp_path / "consensus.svg")
    assert not list(tmp_path.iterdir())


def test_experiment_modules_load_no_optional_package_and_figures_no_pyplot(tmp_path: Path) -> None:
    code = f"""
import sys
from gossip.lab.experiments import datasets, models, partition, records, run_figures
from gossip.lab.loggers import log_forwarding
optional = {{"sklearn", "matplotlib", "tensorboard", "wandb", "mlflow", "rich", "hydra", "safetensors"}}
if loaded := sorted(optional & set(sys.modules)):
    sys.exit(f"loaded {{loaded}}")
run_figures.consensus_figure([[{{"step": 0, "consensus_distance": 1.0}}]], {str(tmp_path / "consensus.png")!r})
sys.exit("pyplot was loaded" if "matplotlib.pyplot" in sys.modules else 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
