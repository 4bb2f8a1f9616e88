"""JSON line records."""

import json
import math
from pathlib import Path

import pytest

from gossip.lab.experiments.records import JsonlWriter, cut_jsonl, read_jsonl, record_files


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
