"""The libraries that these tests train beside are there, so that no test here passes by not running."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest


@pytest.mark.parametrize(
    "library", ["accelerate", "lightning", "peft", "pytorch_lightning", "safetensors", "schedulefree", "transformers"]
)
def test_interop_library_is_installed(library: str) -> None:
    assert importlib.import_module(library)
    assert importlib.metadata.version(library)
