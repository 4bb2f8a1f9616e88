"""A reader of the local run files of wandb, which are in LevelDB's log format with one message per record.

It determines the last step that they contain. See https://github.com/google/leveldb/blob/main/doc/log_format.md; from
version 0.30 on, wandb has no reader of its own.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_BLOCK_BYTES = 32768
_FILE_HEADER_BYTES = 7
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def next_step(folder: Path, run_id: str) -> int:
    """Return the step after the last one in any file of a run; 0 if there is none.

    Parameters
    ----------
    folder : Path
        The folder whose sub-folder ``wandb`` has a folder for each attempt at the run.
    run_id : str
        The W&B run id.
    """
    files = folder.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")
    return max((step + 1 for path in files for step in _steps(path)), default=0)


def _steps(path: Path) -> Iterator[int]:
    from wandb.proto.wandb_internal_pb2 import Record

    for message in _messages(path.read_bytes()):
        record = Record.FromString(message)
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                if item.key == "_step" or list(item.nested_key) == ["_step"]:
                    yield int(json.loads(item.value_json))


def _messages(content: bytes) -> Iterator[bytes]:
    """Yield the messages up to the first incomplete or corrupt one, which a killed process leaves behind."""
    position, parts = _FILE_HEADER_BYTES, b""
    while True:
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _HEADER.size:
            position += left
        if position + _HEADER.size > len(content):
            return
        checksum, size, kind = _HEADER.unpack_from(content, position)
        position += _HEADER.size
        data = content[position : position + size]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            return
        position += size
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if kind in (_FULL, _LAST):
            yield parts
