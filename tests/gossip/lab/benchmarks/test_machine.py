"""A figure says what it was measured on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossip.lab.benchmarks import machine as module
from gossip.lab.benchmarks.networks import Loopback


def test_congestion_control_is_named_where_it_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tcp_congestion_control"
    path.write_text("some-rule\n")
    monkeypatch.setattr(module, "_CONGESTION_CONTROL", path)
    assert f"torch {torch.__version__}, Python 3." in module.machine(Loopback())
    assert "; TCP by some-rule; int8 and int4 by " in module.machine(Loopback())
    path.unlink()
    assert "TCP" not in module.machine(Loopback())
