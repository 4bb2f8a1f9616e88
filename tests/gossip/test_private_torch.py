"""What torch calls private is touched in one file only."""

from __future__ import annotations

import re

from repository import GOSSIP

PRIVATE = re.compile(
    r"\btorch\.(\w+\.)*_(?!_)\w|\bdist\._(?!_)|from torch(\.\w+)*\._|distributed_c10d|_execution_engine"
    r"|\b_optimizer_step_p|_opt_called|_wrapped_by_lr|_active_ddp|_is_fsdp|_coalescing\(|(?<!self)\._(parameters|buffers|modules)\b"
    r"|_non_persistent_buffers|_compiled_call_impl|_step_supports_amp"
)
OTHERS = sorted(path for path in GOSSIP.rglob("*.py") if path.name != "private_torch.py")
WORDS = re.compile(r"#.*|\"[^\"]*\"|_coalescing\((group|\w+, device)")
"""Comments and texts may name it."""


def test_only_one_file_touches_what_is_private() -> None:
    lines = [(path, line) for path in OTHERS for line in path.read_text().splitlines()]
    assert not [(path, line) for path, line in lines if PRIVATE.search(WORDS.sub("", line))]
