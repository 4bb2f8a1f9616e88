"""Every table and figure between markers has a run that makes it, and a page's block is what that run has left."""

import json
import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

from repository import REPOSITORY

evidence = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "scripts" / "evidence.py")))
RUNS = evidence.runs_of()
DRAWN_BY_HAND = {"larger_models.svg", "message.svg"}


def test_markers_and_runs_name_each_other() -> None:
    texts = [page.read_text() for page in evidence.pages_of(REPOSITORY)]
    named = [name for text in texts for name in re.findall(r"<!-- evidence: (\S+) -->", text)]
    blocks = [(name, content) for text in texts for name, _, content in evidence.BLOCK.findall(text)]
    declared = {name: run for run in RUNS.values() for name in run.blocks}
    assert [name for name, _ in blocks] == named, "a block has no end"
    assert set(named) == set(declared)
    for name, content in blocks:
        assert not re.search(r"^(#|```)", content, re.MULTILINE), f"{name} would replace more than results"
        if re.search(r"^\*\d{4}-\d\d-\d\d; ", content, re.MULTILINE):
            assert content.startswith(declared[name].shown), f"{name} was made by another command: make it again"
    shown = {Path(file).name for _, content in blocks for file in re.findall(r"!\[.*\]\((.*)\)", content)}
    kept = {*shown, *(Path(file).name for run in RUNS.values() for file in run.files)}
    files = {path.name for kind in ("*.svg", "*.csv") for path in (REPOSITORY / "docs").rglob(kind)}
    assert files - DRAWN_BY_HAND - kept == {*()}


def test_blocks_are_written_once_from_what_runs_have_left(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "notebooks"))
    shutil.copyfile(REPOSITORY / "README.md", tmp_path / "README.md")
    record = {"status": 0, "date": "2026-11-26T12:00:00", "machine": "a machine", "versions": {"torch": "2"}}
    for name in ("bench_rates", "overlap", "large_model"):
        out = tmp_path / "outputs" / name
        (out / "run").mkdir(parents=True)
        command = "another" if name == "large_model" else RUNS[name].command
        (out / "record.json").write_text(json.dumps({**record, "command": command}))
    sections = (
        f"## Links of {rate}\n\n| method | step, ms |\n| --- | ---: |\n| same | {ms} |\n| same | {ms // 2} |\n"
        for rate, ms in (("50mbit", 40), ("200mbit", 20), ("1gbit", 10))
    )
    (tmp_path / "outputs/bench_rates/output.txt").write_text("\n".join(sections))
    (tmp_path / "outputs/overlap/run/overlap_200mbit.svg").write_text("overlap")
    before = (tmp_path / "docs/larger_models.md").read_text()
    left = evidence.update(tmp_path, RUNS, tmp_path / "outputs")
    assert [line for line in left if re.search("bench_rates|overlap", line)] == []
    assert (tmp_path / "docs/larger_models.md").read_text() == before
    table = (
        f"{RUNS['bench_rates'].shown}\n\n"
        "| step, ms | 50 Mbit/s | 200 Mbit/s | 1 Gbit/s |\n| --- | ---: | ---: | ---: |\n"
        "| same | 40 | 20 | 10 |\n| same | 20 | 10 | 5 |\n\n*2026-11-26; a machine; torch 2.*\n<!-- /evidence -->\n"
    )
    assert table in (tmp_path / "docs/performance.md").read_text()
    assert (tmp_path / "docs/overlap.svg").read_text() == "overlap"
    written = {page: page.read_text() for page in evidence.pages_of(tmp_path)}
    assert evidence.update(tmp_path, RUNS, tmp_path / "outputs") == left
    assert {page: page.read_text() for page in written} == written


def test_a_run_is_repeated_if_it_failed_or_is_another(tmp_path: Path) -> None:
    out, count = tmp_path / "run", tmp_path / "count"
    for command, resumes, succeeds, kept in (
        ("false\ntrue", False, False, "1"),  # each line must succeed
        ("test -e $OUT/kept || { touch $OUT/kept; false; }", True, False, "2"),
        ("test -e $OUT/kept || { touch $OUT/kept; false; }", True, True, "3"),  # goes on with what it has left
        ("test -e $OUT/kept || { touch $OUT/kept; false; }", True, True, "3"),  # is not run again
        ("test ! -e $OUT/kept", True, True, "4"),  # another begins anew
    ):
        run = evidence.Run(command=f"echo >> {count}\n{command}", resumes=resumes)
        assert evidence.measure(run, out) == succeeds
        assert str(len(count.read_text())) == kept
        assert bool(evidence.finished(run, out)) == succeeds
