"""Ranks that nobody watches: what becomes of the others when one dies is seen in the others.

Their time-outs are by a clock that they share, which stands still while the machine keeps one of them from running.
"""

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import shared_clock
import torch
import torch.distributed as dist

from gossip import join_training
from gossip.communication.liveness.process_liveness import is_suspended
from gossip.lab.benchmarks.network.shaped_hosts import Lab, Namespace, store_at
from gossip.launching import fork_server

_PATIENCE_S = 240
_GLANCE_S = 0.02
_TIMEOUT = timedelta(seconds=60)


class _Group(NamedTuple):
    """Of those that join: a name of its own, the place of a rank in it, and its size."""

    name: str
    place: int
    size: int


class _Place(NamedTuple):
    """Where a rank is: ``namespace`` is the file of its host's. One whose ``rank`` is None joins the others.

    ``clock`` is the file of the clock that all share.
    """

    rank: int | None
    world_size: int
    host: str
    port: int
    namespace: str | None
    clock: str
    group: _Group | None = None


class Ranks:
    """Ranks that have been started; they are ended with the block of :func:`started`."""

    def __init__(self, host: str, port: int, clock: str) -> None:
        self.address, self._clock = (host, port), clock
        shared_clock.SharedClock.make(clock)
        self._num_joins = 0
        self._processes: list[ForkServerProcess] = []
        self._channels: list[Connection] = []
        self._deadline = time.monotonic() + _PATIENCE_S

    def join(self, function: Callable[..., Any], *args: Any, group_size: int = 1) -> None:
        """Start ``function(*args)`` in one more process, or shard group, which joins the training of the others."""
        self._num_joins += 1
        for place in range(group_size):
            group = _Group(f"join{self._num_joins}", place, group_size)
            self._start(function, args, _Place(None, 0, *self.address, None, self._clock, group))

    def wait_until_stopped(self, rank: int) -> None:
        """Until its process has ended or is suspended."""
        process = self._processes[rank]
        while process.is_alive() and not is_suspended(process.pid) and time.monotonic() < self._deadline:
            process.join(_GLANCE_S)

    def results(self, *, silent: Container[int] = ()) -> list[Any]:
        """What the function returned on each rank; None for one whose process ended, and for those ``silent``."""
        return [None if rank in silent else self._receive(channel) for rank, channel in enumerate(self._channels)]

    def _receive(self, channel: Connection) -> Any:
        try:
            has_come = channel.poll(max(0.0, self._deadline - time.monotonic()))
            return pickle.loads(channel.recv_bytes()) if has_come else None
        except EOFError:
            return None

    def _start(self, function: Callable[..., Any], args: tuple[Any, ...], place: _Place) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(function, args, place, len(self._processes), theirs))
        process.start()
        theirs.close()
        self._processes.append(process)
        self._channels.append(ours)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for channel in self._channels:
            channel.close()


@contextlib.contextmanager
def started(function: Callable[..., Any], *args: Any, world_size: int, hosts: Lab | None = None) -> Iterator[Ranks]:
    """Within the block ``function(*args)`` runs on every rank of a new process group."""
    store = store_at("127.0.0.1", _TIMEOUT) if hosts is None else hosts.start_store(_TIMEOUT)
    fork_server.start(("gossip",))
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(store.host, store.port, str(Path(folder) / "clock"))
        try:
            for rank in range(world_size):
                namespace = None if hosts is None else f"/proc/{os.getpid()}/fd/{hosts._hosts[rank].file}"
                ranks._start(function, args, _Place(rank, world_size, store.host, store.port, namespace, ranks._clock))
            yield ranks
        finally:
            ranks._end()


def results_of(
    function: Callable[..., Any], *args: Any, world_size: int, num_joining: int = 0, silent: Container[int] = ()
) -> list[Any]:
    """What it returns on every rank, and in so many processes that join them, which are started at once."""
    with started(function, *args, world_size=world_size) as ranks:
        for _ in range(num_joining):
            ranks.join(function, *args)
        return ranks.results(silent=silent)


def _work(function: Callable[..., Any], args: tuple[Any, ...], place: _Place, number: int, channel: Connection) -> None:
    rank, world_size, host, port, namespace, clock, group = place
    torch.set_num_threads(1)
    shared_clock.SharedClock(clock, number).replace_monotonic()
    from gossip.lab.faults import injection  # it loads what a test shows not to be loaded otherwise

    injection._THAW = shared_clock.THAW.format(helpers=str(Path(__file__).parent), file=clock)
    with contextlib.ExitStack() as stack:
        if namespace is not None:
            inside = Namespace.__new__(Namespace)
            inside.file = os.open(namespace, os.O_RDONLY)
            stack.enter_context(inside.entered())
            os.environ["GLOO_SOCKET_IFNAME"] = Lab.interface
        store = dist.TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
        if group is not None and group.size > 1:
            of_group = dist.PrefixStore(group.name, store)
            dist.init_process_group("gloo", store=of_group, rank=group.place, world_size=group.size, timeout=_TIMEOUT)
        if rank is None:
            join_training(store)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        channel.send_bytes(pickle.dumps(function(*args)))  # not send(), which takes a descriptor for each tensor
        channel.poll(_PATIENCE_S)  # the others may still look at this process
