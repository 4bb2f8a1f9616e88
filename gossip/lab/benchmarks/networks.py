"""Networks of a benchmark's workers: loopback, or a lab in which each has a host (:mod:`.shaped_hosts`)."""

from __future__ import annotations

import contextlib
import re
import socket
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class Network(Protocol):
    """The network that connects the workers.

    Attributes
    ----------
    name : str
        Either "loopback" or "lab".
    interface : str
        The network interface that a worker uses.
    shared : bool
        Whether all workers use the same interface, so that its counters are the sum over the workers.
    """

    name: str
    interface: str
    shared: bool

    def address(self, rank: int) -> str:
        """Return the IPv4 address of a worker."""

    def start_store(self, timeout: timedelta) -> dist.TCPStore:
        """Start a key-value store in this process that every worker can reach."""

    def entered(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which new processes are started on the worker's host."""

    def shape(self, bits_per_second: int) -> None:
        """Limit every link to this rate in each direction."""

    def close(self) -> None:
        """Release all resources."""


class Loopback:
    """All workers on 127.0.0.1, with links as fast as memory."""

    name = "loopback"
    interface = "lo"
    shared = True

    def address(self, rank: int) -> str:  # noqa: ARG002
        """Return 127.0.0.1, the address of all workers."""
        return "127.0.0.1"

    def start_store(self, timeout: timedelta) -> dist.TCPStore:
        """Start the store on a free port of 127.0.0.1."""
        return store_at("127.0.0.1", timeout)

    def entered(self, rank: int) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Return a context manager that does nothing."""
        return contextlib.nullcontext()

    def shape(self, bits_per_second: int) -> None:
        """Raise ValueError: loopback cannot be shaped."""
        raise ValueError(f"loopback cannot be shaped, asked for {bits_per_second} bit/s; take bench.network=lab")

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def store_at(address: str, timeout: timedelta) -> dist.TCPStore:
    """Start a key-value store on a free port of this address only, in the network namespace of this thread."""
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )


def bits_per_second(rate: str) -> int:
    """Parse a rate in the notation of tc, such as 200mbit, 1.5gbit or 800kbit.

    Raises
    ------
    ValueError
        The text is not such a rate, or the rate is less than 1 kbit.

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
