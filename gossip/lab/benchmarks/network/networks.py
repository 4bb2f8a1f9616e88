"""Links of the lab, and the store by which workers on its hosts meet (:mod:`.shaped_hosts`)."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MAX_DELAY_S = 1.0


@dataclass(frozen=True)
class Link:
    """The link by which every host of the lab is connected.

    Attributes
    ----------
    bits_per_second : int
        The rate in each direction.
    delay_s : float
        The one-way delay between two hosts, in addition to the transmission time.
    """

    bits_per_second: int
    delay_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        """Parse a rate in the notation of tc, optionally followed by a delay.

        Raises
        ------
        ValueError
            The text is not a rate with an optional delay, or a value is out of range.

        Examples
        --------
        >>> Link.parse("1.5gbit"), Link.parse("50mbit+50ms")
        (Link(bits_per_second=1500000000, delay_s=0.0), Link(bits_per_second=50000000, delay_s=0.05))
        """
        rate, plus, delay = text.partition("+")
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.strip().lower())
        bits = round(float(found[1]) * _UNITS[found[2]]) if found else 0
        if bits < 1000:
            raise ValueError(f"rate must be a number with kbit, mbit or gbit, such as 200mbit, got {text!r}")
        found = re.fullmatch(r"(\d+(?:\.\d+)?)ms", delay.strip())
        delay_s = float(found[1]) / 1e3 if found else 0.0
        if (plus and not found) or delay_s > _MAX_DELAY_S:
            raise ValueError(
                f"a link's delay must be a number with ms, at most {1e3 * _MAX_DELAY_S:g}, such as 50mbit+50ms, "
                f"got {text!r}"
            )
        return cls(bits, delay_s)


def store_at(address: str, timeout: timedelta) -> dist.TCPStore:
    """Start a key-value store on a free port of this address only, in the network namespace of this thread."""
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )
