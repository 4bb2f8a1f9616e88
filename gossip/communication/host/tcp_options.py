"""How soon TCP retransmits after an outage, on the connections between ranks.

The kernel doubles the pause between two attempts: it retransmits 0.2, 0.6, 1.4, 3, 6.2 and 12.6 s after the first
transmission. A network that is back after 7 s is then silent for another 6 s, and a rank that waits for 10 s fails.
Linux 6.15 and later let a socket limit these pauses, to at least one second, and so to a tenth of a time-out of 10 s or
more. After an outage two pauses may be needed: if the data that arrive again had arrived before, and only their
acknowledgement was lost, TCP assumes that everything else is on its way, until it gets no acknowledgement of that
either (F-RTO, RFC 5682). Therefore a rank that has waited for the time-out waits for another fifth of it.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

_TCP_RTO_MAX_MS = 44  # linux/tcp.h; Python's socket module does not define it
_SHORTEST_PAUSE_MS, _LONGEST_PAUSE_MS = 1_000, 120_000  # the range that the kernel accepts
_FIRST_PAUSE_MS = 200
_USUAL_NUM_ATTEMPTS = 15
_NUM_ATTEMPTS = Path("/proc/sys/net/ipv4/tcp_retries2")
_OPEN_FILES = "/proc/self/fd"


def with_resending(timeout: timedelta) -> timedelta:
    """Return how long to wait for data that an outage shorter than nine tenths of ``timeout`` delays."""
    return timeout + 2 * timeout / 10


@contextlib.contextmanager
def resending_soon(timeout: timedelta) -> Iterator[None]:
    """Let connections made within the block retransmit as often as one that lasts for ``timeout`` can.

    Where the kernel does not support this, they are left unchanged. Connections that another thread makes meanwhile are
    included.
    """
    before, num_attempts = open_sockets(), _USUAL_NUM_ATTEMPTS
    yield
    with contextlib.suppress(OSError, ValueError):
        num_attempts = int(_NUM_ATTEMPTS.read_text())
    pause_ms = longest_pause_ms(timeout, num_attempts)
    for number, _ in open_sockets() - before:
        # If it is a TCP socket, and the kernel knows the option.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as shared:
            if shared.family in (socket.AF_INET, socket.AF_INET6) and shared.type == socket.SOCK_STREAM:
                shared.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, pause_ms)


def longest_pause_ms(timeout: timedelta, num_attempts: int) -> int:
    """Return the shortest bound of the pauses at which ``num_attempts`` attempts take longer than ``timeout``.

    The kernel drops a connection after a number of attempts, which must not happen before the time-out: with the
    shortest possible pauses every connection would end in an outage of 15 s, however long a rank is willing to wait.

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


def open_sockets() -> set[tuple[int, int]]:
    """Return the open sockets of this process, each with what distinguishes it from a later one of the same number."""
    found = set()
    with contextlib.suppress(OSError):  # without /proc none can be found
        for number in map(int, os.listdir(_OPEN_FILES)):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(number)
                if stat.S_ISSOCK(status.st_mode):
                    found.add((number, status.st_ino))
    return found
