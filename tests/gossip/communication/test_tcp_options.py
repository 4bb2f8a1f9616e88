"""How soon TCP tries again: which connections are told, and what they are told."""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
from lab_hosts import RTO_MAX_MS, kernel_knows_rto_max
from ranks import on_ranks
from replicas import SGD, NormalisedNet

from gossip import GossipDataParallel
from gossip.communication.host import tcp_options
from gossip.communication.host.tcp_options import longest_pause_ms, resending_soon, with_resending

needs_kernel = pytest.mark.skipif(not kernel_knows_rto_max(), reason="TCP_RTO_MAX_MS came with Linux 6.15")


def bound_of(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, RTO_MAX_MS)


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


@needs_kernel
def test_connections_of_the_block_resend_soon_and_no_others() -> None:
    with contextlib.ExitStack() as open_ones, connected() as before:
        usual = bound_of(before[0])
        with resending_soon(timedelta(seconds=10)):
            inside = open_ones.enter_context(connected())
            strangers = [socket.socket(socket.AF_UNIX), socket.socket(type=socket.SOCK_DGRAM)]
            for stranger in strangers:
                open_ones.enter_context(stranger)
            open_ones.enter_context(open(os.devnull, "rb"))
        with connected() as after:
            assert [bound_of(each) for each in (*before, *after)] == [usual] * 4
        assert [bound_of(each) for each in inside] == [1000, 1000]
        inside[0].sendall(b"still open")
        assert inside[1].recv(10) == b"still open"


def test_where_the_kernel_cannot_connections_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_options, "_TCP_RTO_MAX_MS", 9999)  # nobody's
    with contextlib.ExitStack() as open_ones:
        with resending_soon(timedelta(seconds=10)):
            one, other = open_ones.enter_context(connected())
        one.sendall(b"as ever")
        assert other.recv(10) == b"as ever"


@pytest.mark.parametrize("num_attempts", [5, 8, 15])
@pytest.mark.parametrize("seconds", [0.5, 5, 10, 30, 60, 240, 600, 900])
def test_no_connection_is_given_up_before_the_timeout(seconds: float, num_attempts: int) -> None:
    def lasts_ms(bound_ms: int) -> int:
        """As the kernel counts: the first attempt, and then so many, the pauses from 200 ms on doubled."""
        return sum(min(200 * 2**attempt, bound_ms) for attempt in range(num_attempts + 1))

    bound_ms = longest_pause_ms(timedelta(seconds=seconds), num_attempts)
    assert 1000 <= bound_ms <= 120_000
    assert lasts_ms(bound_ms) >= 1e3 * seconds or bound_ms == 120_000 or lasts_ms(120_000) < 1e3 * seconds
    if bound_ms > 1000:
        assert lasts_ms(bound_ms - 1) < 1e3 * seconds
    if num_attempts == 15 and 10 <= seconds <= 60:  # what the wait is longer by is enough for two pauses
        assert with_resending(timedelta(seconds=seconds)) >= timedelta(seconds=seconds, milliseconds=2 * bound_ms)


@needs_kernel
@on_ranks(3, anew=True)
def test_connections_between_ranks_resend_soon() -> None:
    """The TCP connections that a model's construction adds to this rank's."""
    before, timeout = tcp_options.open_sockets(), timedelta(seconds=60)
    with GossipDataParallel(NormalisedNet(), SGD, "complete", timeout=timeout):
        found = []
        for number, _ in tcp_options.open_sockets() - before:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as shared:
                if shared.type == socket.SOCK_STREAM and shared.family in (socket.AF_INET, socket.AF_INET6):
                    shared.getpeername()
                    found.append(bound_of(shared))
    assert len(found) >= 3  # one to each of the others, and one to the store
    told = longest_pause_ms(timeout, 15)
    assert all(told <= bound <= told + 10 for bound in found)  # the kernel counts in ticks of up to 10 ms
