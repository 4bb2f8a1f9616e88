"""A description of the machine that a benchmark ran on."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import torch

from gossip.compression.compiled_passes import quantized_by
from gossip.lab.benchmarks.networks import Network

_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def machine(network: Network) -> str:
    """Describe versions, processors, TCP's congestion control on the hosts, and the quantizer of int8 and int4."""
    tcp = ""
    with contextlib.suppress(OSError), network.entered(0):
        tcp = f" TCP by {_CONGESTION_CONTROL.read_text().strip()};"
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores "
        f"({platform.machine()});{tcp} int8 and int4 by {quantized_by()}."
    )
