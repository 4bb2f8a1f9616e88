"""The goodput of the links, measured by plain TCP between pairs of ranks in both directions at once."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from gossip.communication.json_gathering import all_gather_json
from gossip.lab.benchmarks.benchmark import Place
from gossip.lab.benchmarks.network.counters import InterfaceBytes

_WARM_UP_S = 0.4  # TCP slow start, and the burst of a token bucket
_WINDOW_S = 1.0
_CHUNK_BYTES = 1 << 16


def measure(place: Place, *, local_size: int, timeout_s: float) -> float | None:
    """Measure the bytes per second that this rank sends while it receives as many. Collective.

    The interface counts the bytes. The ranks of hosts 0 and 1 form pairs, those of hosts 2 and 3, and so on; all pairs
    are measured at the same time. Ranks that share an interface get the mean over those of them that have a peer.

    Parameters
    ----------
    place : Place
        The place of this rank, to whose address its peer connects.
    local_size : int
        The number of ranks on each host.
    timeout_s : float
        The time-out of each wait.

    Returns
    -------
    float or None
        The goodput; None for a rank without a peer.

    Raises
    ------
    OSError
        The peer cannot be reached.
    ExchangeError
        A rank did not take part in time.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    peer = (rank // local_size ^ 1) * local_size + rank % local_size
    connection: socket.socket | None = None
    with socket.create_server((place.address, 0)) as listener:
        listener.settimeout(timeout_s)
        patience = timedelta(seconds=timeout_s)
        places = all_gather_json(listener.getsockname(), "measuring what the links carry", patience)
        if peer < world_size:
            peers = (str(places[peer][0]), int(places[peer][1]))
            connection = listener.accept()[0] if rank < peer else socket.create_connection(peers, timeout=timeout_s)
    dist.barrier()
    if connection is None:
        return None
    num_busy = min(place.num_sharing, world_size - world_size % (2 * local_size))
    with connection:
        connection.settimeout(timeout_s)
        return _exchange(connection, place.interface) / num_busy


def _exchange(connection: socket.socket, interface: str) -> float:
    """Exchange data with the peer, and return the bytes per second that the interface sends meanwhile."""
    start = time.monotonic()
    end = start + _WARM_UP_S + _WINDOW_S
    receiver = threading.Thread(target=_drain, args=(connection,), name="goodput")
    receiver.start()
    chunk = bytes(_CHUNK_BYTES)
    first: tuple[float, InterfaceBytes] | None = None
    while (now := time.monotonic()) < end:
        if first is None and now >= start + _WARM_UP_S:
            first = now, InterfaceBytes.read(interface)
        connection.sendall(chunk)
    sent = InterfaceBytes.read(interface)
    connection.shutdown(socket.SHUT_WR)
    receiver.join()
    if first is None:
        raise OSError(f"the link did not carry {_CHUNK_BYTES} bytes within {_WARM_UP_S + _WINDOW_S} s")
    return sent.since(first[1]).sent / (now - first[0])


def _drain(connection: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    while connection.recv_into(buffer):
        pass
