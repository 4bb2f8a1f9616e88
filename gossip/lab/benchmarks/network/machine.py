"""A description of the machine that a benchmark ran on."""

from __future__ import annotations

import contextlib
import os
import platform
import socket

import torch

from gossip.compression.compiled_passes import quantized_by
from gossip.lab.benchmarks.network.networks import Network

_MAX_NAME_BYTES = 16
_ANY_PORT = 9


def machine(network: Network) -> str:
    """Describe versions, processors, TCP's congestion control on the hosts, and the quantizer of int8 and int4."""
    tcp = ""  # a system other than Linux does not say which one it uses
    with contextlib.suppress(OSError, AttributeError), network.entered(0):
        tcp = f" TCP by {congestion_control(network.address(1))};"
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, kernel {platform.release()}, "
        f"{os.cpu_count()} cores ({platform.machine()});{tcp} int8 and int4 by {quantized_by()}."
    )


def congestion_control(address: str) -> str:
    """Return what controls the congestion of a TCP connection from here to an address, which need not answer. Local."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        connection.connect_ex((address, _ANY_PORT))
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _MAX_NAME_BYTES)
    return name.rstrip(b"\0").decode()
