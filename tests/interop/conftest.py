"""Beside other libraries."""

from collections.abc import Sequence

import pytest
from preloaded import PRELOAD

LIBRARIES = (
    "accelerate",
    "lightning.pytorch",
    "peft",
    "transformers.models.gpt2",
    "transformers.models.llama",
    "transformers.trainer",
)


@pytest.fixture(scope="session")
def preloaded_modules() -> Sequence[str]:
    """With what these libraries import only when they are asked for a model: seconds, on every rank."""
    return (*PRELOAD, *LIBRARIES)
