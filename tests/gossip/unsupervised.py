"""Ranks that nobody watches: what becomes of the others when one dies is seen in the others."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from gossip import fork_server

_PATIENCE_S = 60


def run(function: Callable[..., Any], *args: Any, world_size: int, silent: int | None = None) -> list[Any]:
    """What ``function(*args)`` returns on each rank; None for one whose process ended, and for rank ``silent``."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    fork_server.start(("gossip",))
    context = multiprocessing.get_context("forkserver")
    processes, channels = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(function, args, rank, world_size, store.port, theirs))
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
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, port: int, channel: Connection
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    channel.send(function(*args))
    channel.poll(_PATIENCE_S)  # the others may still look at this process
