"""Records of a run as JSON lines: one object per line, readable by any tool and while the run is in progress."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

Record = dict[str, Any]
"""What a rank has written about one step or measurement, as plain JSON types."""

TOGETHER_FILE = "workers.jsonl"
"""The record file of a run whose ranks all share one process; its records are means over the ranks."""


class JsonlWriter:
    """Appends records to a file, one JSON object per line, and flushes each to the operating system.

    JSON has neither NaN nor infinity: such a number is written as ``null``, so that the key still shows that it was
    measured. A context manager. An existing file is appended to, without the records that an earlier attempt left from
    ``step`` on, which is the first one to be written; missing folders are created.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with JsonlWriter(f"{folder}/rank0.jsonl") as writer:
    ...         writer.write({"step": 0, "loss": float("nan")})
    ...     read_jsonl(f"{folder}/rank0.jsonl")
    [{'step': 0, 'loss': None}]
    """

    def __init__(self, path: str | Path, step: float = math.inf) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_jsonl(path, step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record of plain data; a TypeError, of a tensor for example, leaves the file as it was."""
        self._file.write(json.dumps(without_non_finite(record), allow_nan=False) + "\n")

    def sync(self) -> None:
        """Wait until everything that was written has reached the disk (``os.fsync``)."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_jsonl(path: str | Path) -> list[Record]:
    """Read the records of a file that :class:`JsonlWriter` wrote, in order.

    A last line without a newline is ignored: the run is still writing it, or was killed while writing it. A ValueError
    names file and line of a complete line that is not a JSON object.
    """
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    return [_record(line, path, number) for number, line in enumerate(lines, start=1)]


def record_files(folder: Path) -> list[Path]:
    """Return the record files in a folder: one for all ranks, or one per rank in rank order, or both if both exist."""
    found = {path.stem.removeprefix("rank"): path for path in folder.glob("rank*.jsonl")}
    return [*folder.glob(TOGETHER_FILE), *(found[rank] for rank in sorted(filter(str.isdecimal, found), key=int))]


def cut_jsonl(path: str | Path, step: float) -> None:
    """Remove the records from ``step`` on, and an incomplete last line; do nothing if there is no file. Local.

    Raises a ValueError, and removes nothing, if a complete line is not a JSON object.
    """
    if not Path(path).exists():
        return
    size = 0
    with open(path, "r+b") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or _record(line, path, number).get("step", -1) >= step:
                break
            size += len(line)
        file.truncate(size)


def without_non_finite(value: Any) -> Any:
    """Return plain data with None in place of every NaN and infinity, which JSON cannot represent."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def leaves(content: Mapping[str, Any], above: str = "", *, separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, with the keys that lead to them."""
    for key, value in content.items():
        name = f"{above}{separator}{key}" if above else str(key)
        if isinstance(value, Mapping):
            yield from leaves(value, name, separator=separator)
        else:
            yield name, value


def _record(line: bytes, path: str | Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}); remove the line or the file") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: a record must be a JSON object, got {line[:40]!r}; remove the line")
    return record
