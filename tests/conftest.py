"""Every test leaves the process as it found it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    threads, environment = set(threading.enumerate()), dict(os.environ)
    yield
    changed = {name for name in environment | dict(os.environ) if environment.get(name) != os.environ.get(name)}
    assert changed <= {"PYTEST_CURRENT_TEST"}, f"environment variables were changed: {changed}"
    assert not dist.is_initialized(), "a process group was left open"
    left = {thread for thread in threading.enumerate() if thread.is_alive()} - threads
    # The fork server and the key-value store's clients are kept for the next launch; they are no Python threads.
    assert not left, f"threads were left running: {left}"
