"""The figure of a sweep shows the consensus distance, relative to the mean and absolute."""

from __future__ import annotations

import json
from pathlib import Path

from report_documents import document, row
from running import run_here


def test_both_distances_are_drawn_if_both_are_known(tmp_path: Path) -> None:
    older = row("ring")
    del older["curves"]["consensus_absolute"]
    for known, num_expected in ((row("ring"), 1), (older, 0)):
        (tmp_path / "results.json").write_text(json.dumps(document([known])), encoding="utf-8")
        done = run_here("comparison_figure.py", tmp_path, tmp_path / "figure.svg")
        assert done.status == 0, done.stderr
        drawn = (tmp_path / "figure.svg").read_text(encoding="utf-8")
        assert drawn.count("<!-- relative consensus distance -->") == 1
        assert drawn.count("<!-- consensus distance -->") == num_expected
