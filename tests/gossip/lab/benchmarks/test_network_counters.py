"""What is counted of the network and of memory."""

from __future__ import annotations

import pytest
import torch

from gossip.lab.benchmarks.network.counters import InterfaceBytes, PeakMemory
from gossip.lab.benchmarks.network.networks import Link


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
