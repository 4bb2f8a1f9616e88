"""What is logged, for tests that look at it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from loguru import logger


@contextlib.contextmanager
def logged(level: str = "WARNING") -> Iterator[list[str]]:
    """The messages of this level and above that are logged within the block."""
    texts: list[str] = []
    sink = logger.add(lambda message: texts.append(message.record["message"]), level=level)
    try:
        yield texts
    finally:
        logger.remove(sink)
