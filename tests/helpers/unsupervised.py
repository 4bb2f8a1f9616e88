"""Ranks that nobody watches: what becomes of the others when one dies is seen in the others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from gossip.lab.benchmarks.namespaces import Namespace
from gossip.lab.benchmarks.networks import store_at
from gossip.lab.benchmarks.shaped_hosts import Lab
from gossip.launching import fork_server

_PATIENCE_S = 60
_TIMEOUT = timedelta(seconds=60)


def run(
    function: Callable[..., Any], *args: Any, world_size: int, silent: int | None = None, hosts: Lab | None = None
) -> list[Any]:
    """What ``function(*args)`` returns on each rank; None for one whose process ended, and for rank ``silent``."""
    store = store_at("127.0.0.1", _TIMEOUT) if hosts is None else hosts.start_store(_TIMEOUT)
    fork_server.start(("gossip",))
    context = multiprocessing.get_context("forkserver")
    processes, channels = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            namespace = None if hosts is None else f"/proc/{os.getpid()}/fd/{hosts._hosts[rank].file}"
            place = (rank, world_size, store.host, store.port, namespace)
            process = context.Process(target=_work, args=(function, args, place, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            channels.append(ours)
        return [None if rank == silent else _receive(channel) for rank, channel in enumerate(channels)]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for channel in channels:
            channel.close()


def _receive(channel: Connection) -> Any:
    try:
        return channel.recv() if channel.poll(_PATIENCE_S) else None
    except EOFError:
        return None


def _work(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    place: tuple[int, int, str, int, str | None],
    channel: Connection,
) -> None:
    rank, world_size, host, port, namespace = place
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if namespace is not None:
            inside = Namespace.__new__(Namespace)
            inside.file = os.open(namespace, os.O_RDONLY)
            stack.enter_context(inside.entered())
            os.environ["GLOO_SOCKET_IFNAME"] = Lab.interface
        store = dist.TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        channel.send(function(*args))
        channel.poll(_PATIENCE_S)  # the others may still look at this process
