"""A figure says what it was measured on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from gossip.lab.benchmarks.machine import congestion_control, machine
from gossip.lab.benchmarks.networks import Loopback

_USUAL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@pytest.mark.skipif(not _USUAL.exists(), reason="this kernel does not say which congestion control TCP uses")
def test_a_connection_is_asked_for_its_congestion_control() -> None:
    usual = _USUAL.read_text().strip()
    assert congestion_control("127.0.0.1") == usual
    assert f" TCP by {usual}; int8 and int4 by " in machine(Loopback())


def test_congestion_control_is_named_only_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_CONGESTION", raising=False)
    line = machine(Loopback())
    assert f"torch {torch.__version__}, Python 3." in line
    assert "TCP" not in line
