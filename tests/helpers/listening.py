"""What is logged, for tests that look at it."""

import contextlib
import warnings
from collections.abc import Iterator

from loguru import logger


@contextlib.contextmanager
def logged(level: str = "WARNING") -> Iterator[list[str]]:
    """The messages of this level and above that are logged within the block."""
    texts: list[str] = []
    sink = logger.add(lambda message: texts.append(message.record["message"]), level=level)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # some are issued by ``warnings`` too
            yield texts
    finally:
        logger.remove(sink)
