"""Where the workers of a benchmark are: on this machine's loopback, or each on a host of its own (:mod:`.lab`)."""

from __future__ import annotations

import contextlib
import re
import socket
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class Network(Protocol):
    """The links between the workers.

    Attributes
    ----------
    name : str
        "loopback" or "lab".
    interface : str
        The network interface that a worker uses.
    shared : bool
        Whether all workers use the same one, so that its counters are the sum over them.
    """

    name: str
    interface: str
    shared: bool

    def address(self, rank: int) -> str:
        """The IPv4 address of a worker."""

    def start_store(self, timeout: timedelta) -> dist.TCPStore:
        """A key-value store of this process that every worker can reach."""

    def entered(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Within the block, a process that is started is on the worker's host."""

    def shape(self, bits_per_second: int) -> None:
        """Let every link carry so much, each way."""

    def close(self) -> None:
        """Give everything back."""


class Loopback:
    """All workers on 127.0.0.1, at the speed of memory."""

    name = "loopback"
    interface = "lo"
    shared = True

    def address(self, rank: int) -> str:  # noqa: ARG002
        """The same for all."""
        return "127.0.0.1"

    def start_store(self, timeout: timedelta) -> dist.TCPStore:
        """On a free port."""
        return store_at("127.0.0.1", timeout)

    def entered(self, rank: int) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Nothing to enter."""
        return contextlib.nullcontext()

    def shape(self, bits_per_second: int) -> None:
        """There is nothing to shape."""
        raise ValueError(f"loopback cannot be shaped, asked for {bits_per_second} bit/s; take bench.network=lab")

    def close(self) -> None:
        """Nothing to give back."""


def store_at(address: str, timeout: timedelta) -> dist.TCPStore:
    """A key-value store on a free port of this address alone, in the network namespace of this thread."""
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )


def bits_per_second(rate: str) -> int:
    """What a rate in tc's words means: 200mbit, 1.5gbit, 800kbit.

    Raises
    ------
    ValueError
        It is no such rate, or less than 1 kbit.

    Examples
    --------
    >>> bits_per_second("200mbit")
    200000000
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.strip().lower())
    bits = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if bits < 1000:
        raise ValueError(f"rate must be a number with kbit, mbit or gbit, such as 200mbit, got {rate!r}")
    return bits
