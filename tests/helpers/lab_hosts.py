"""Where there can be hosts of network namespaces, and connections that soon try again."""

import contextlib
import socket

from gossip.lab.benchmarks.network import shaped_hosts
from gossip.lab.benchmarks.network.shaped_hosts import Namespace

RTO_MAX_MS = 44  # linux/tcp.h: TCP_RTO_MAX_MS


def kernel_knows_rto_max() -> bool:
    with socket.socket() as unconnected, contextlib.suppress(OSError):
        unconnected.setsockopt(socket.IPPROTO_TCP, RTO_MAX_MS, 1000)
        return True
    return False


def why_no_hosts() -> str | None:
    """What is missing here for a :class:`gossip.lab.benchmarks.network.shaped_hosts.Lab`; None if nothing is."""
    missing = shaped_hosts.what_is_missing()
    if missing is None:
        try:
            Namespace().close()
        except OSError as error:
            missing = f"network namespaces are not permitted here ({error.strerror})"
    return missing
