"""The libraries that these tests train beside are there, so that no test here passes by not running."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("library", ["accelerate", "peft", "safetensors", "transformers"])
def test_interop_library_is_installed(library: str) -> None:
    assert importlib.import_module(library).__version__
