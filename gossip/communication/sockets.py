"""How soon TCP tries again after an outage, on the connections between ranks.

The kernel doubles the pause between two attempts: it sends again 0.2, 0.6, 1.4, 3, 6.2 and 12.6 s after the first one.
A network that is back after 7 s is then silent for 6 s more, and who waits for 10 s gives up. Linux 6.15 and later let
a socket bound these pauses, to one second and more, and so a tenth of a time-out from 10 s on. After an outage it may
take two of them: if what arrives again had arrived before, and only its acknowledgement was lost, TCP takes all else
for underway, too, until it hears nothing of that either (F-RTO, RFC 5682). So whoever has waited for the time-out
waits for a fifth of it more.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

_TCP_RTO_MAX_MS = 44  # linux/tcp.h; Python's socket module does not know it
_SHORTEST_PAUSE_MS, _LONGEST_PAUSE_MS = 1_000, 120_000  # what the kernel takes
_FIRST_PAUSE_MS = 200
_USUAL_NUM_ATTEMPTS = 15
_NUM_ATTEMPTS = Path("/proc/sys/net/ipv4/tcp_retries2")
_OPEN_FILES = Path("/proc/self/fd")


def with_resending(timeout: timedelta) -> timedelta:
    """Return how long to wait, for what an outage shorter than nine tenths of ``timeout`` holds up to arrive."""
    return timeout + 2 * timeout / 10


@contextlib.contextmanager
def resending_soon(timeout: timedelta) -> Iterator[None]:
    """Let the connections that are made within the block resend as often as one that lasts for ``timeout`` can.

    Where the kernel cannot do that they stay as they are. Those that another thread makes meanwhile are included.
    """
    before = _connections()
    yield
    pause_ms = longest_pause_ms(timeout, _num_attempts())
    for number, identity in _connections().items():
        if before.get(number) != identity:
            _bound(number, pause_ms)


def longest_pause_ms(timeout: timedelta, num_attempts: int) -> int:
    """Return the shortest bound of the pauses with which so many attempts take longer than ``timeout``.

    The kernel gives a connection up after a number of attempts, which must not come before the time-out: pauses as
    short as can be would end every connection in an outage of 15 s, however long somebody is ready to wait.

    Examples
    --------
    >>> [longest_pause_ms(timedelta(seconds=s), 15) for s in (1, 10, 60, 300, 1800)]
    [1000, 1000, 4891, 31125, 120000]
    """
    needed_ms = timeout / timedelta(milliseconds=1)
    passed_ms, pause_ms = 0, _FIRST_PAUSE_MS
    for attempts_left in range(num_attempts + 1, 0, -1):
        bound_ms = -(-(needed_ms - passed_ms) // attempts_left)
        if bound_ms <= pause_ms:
            break
        passed_ms += pause_ms
        pause_ms *= 2
    return int(min(max(bound_ms, _SHORTEST_PAUSE_MS), _LONGEST_PAUSE_MS))


def _num_attempts() -> int:
    try:
        return int(_NUM_ATTEMPTS.read_text())
    except (OSError, ValueError):
        return _USUAL_NUM_ATTEMPTS


def _connections() -> dict[int, str]:
    """Return the sockets that this process has open, each with what tells it from a later one of its number."""
    found = {}
    with contextlib.suppress(OSError):  # without /proc there are none to be found
        for entry in _OPEN_FILES.iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                identity = os.readlink(entry)
                if identity.startswith("socket:"):
                    found[int(entry.name)] = identity
    return found


def _bound(number: int, pause_ms: int) -> None:
    """Set the option on the socket behind a file descriptor, if it is TCP's and the kernel knows the option."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as shared:
        if shared.family in (socket.AF_INET, socket.AF_INET6) and shared.type == socket.SOCK_STREAM:
            shared.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, pause_ms)
