"""What is counted of the network and of memory, and what a report says about the machine."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
from benchmark_cases import place_of, step_time_case
from ranks import run_ranks

from gossip.lab.benchmarks.network import goodput
from gossip.lab.benchmarks.network.counters import InterfaceBytes, PeakMemory
from gossip.lab.benchmarks.network.machine import congestion_control, machine
from gossip.lab.benchmarks.network.networks import Link, Network

_USUAL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def measure_on_an_interface_that_sends_12_bytes_per_s(num_sharing: int) -> float | None:
    with mock.patch.object(goodput, "_exchange", return_value=12.0):
        place = place_of(0, step_time_case(), Path(), num_sharing)
        return goodput.measure(place, local_size=1, timeout_s=60)


@pytest.mark.parametrize(
    ("num_sharing", "world_size", "expected"),
    [(1, 2, [12.0, 12.0]), (2, 2, [6.0, 6.0]), (3, 3, [6.0, 6.0, None]), (4, 4, [3.0, 3.0, 3.0, 3.0])],
)
def test_shared_interface_is_divided_among_the_ranks_that_send(
    num_sharing: int, world_size: int, expected: list[float | None]
) -> None:
    measured = run_ranks(measure_on_an_interface_that_sends_12_bytes_per_s, num_sharing, world_size=world_size)
    assert measured == expected


@pytest.mark.skipif(not _USUAL.exists(), reason="this kernel does not say which congestion control TCP uses")
def test_a_connection_is_asked_for_its_congestion_control() -> None:
    usual = _USUAL.read_text().strip()
    assert congestion_control("127.0.0.1") == usual
    assert f" TCP by {usual}; int8 and int4 by " in machine(Network())


def test_congestion_control_is_named_only_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_CONGESTION", raising=False)
    line = machine(Network())
    assert f"torch {torch.__version__}, Python 3." in line
    assert "TCP" not in line


def test_links_have_a_rate_and_perhaps_a_delay() -> None:
    assert [Link.parse(text) for text in ("200mbit", "64kbit")] == [Link(200_000_000), Link(64_000)]
    assert Link.parse("1.5gbit+50ms") == Link(1_500_000_000, 0.05)
    for text in ("50mbit+", "50mbit+50", "50mbit+5000ms"):
        with pytest.raises(ValueError, match="a link's delay must be a number with ms, at most 1000"):
            Link.parse(text)
    for text in ("200", "0mbit", "fast"):
        with pytest.raises(ValueError, match="rate must be a number with kbit, mbit or gbit, such as 200mbit, got"):
            Link.parse(text)


def test_counters_interface_that_is_not_there() -> None:
    assert InterfaceBytes.read("lo").sent >= 0
    with pytest.raises(ValueError, match="interface must be one of /proc/net/dev, got 'nothing0'"):
        InterfaceBytes.read("nothing0")


def test_counters_peak_memory_is_above_what_was_there() -> None:
    kept = torch.ones(5_000_000)
    memory = PeakMemory()
    del kept
    taken = torch.ones(20_000_000)
    del taken
    assert 50e6 < memory.bytes() < 95e6
