"""Ranks that stand ready: processes that run one function after the other, each time in a new process group.

To start processes, and what torch does first in each, costs more than most tests do with them. Where the start, the end
or the state of a process is what is tested, :func:`gossip.launch` starts them anew.
"""

import atexit
import faulthandler
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gossip import launch
from gossip.communication import membership, training_store
from gossip.launching import fork_server

TIMEOUT = timedelta(seconds=240)
_GRACE_S = 2.0  # between the first failure and the one that was its cause


class RankError(AssertionError):
    """A function failed on some rank; all ranks have been ended by then."""


class _Standing(NamedTuple):
    process: ForkServerProcess
    channel: Connection


class _Call(NamedTuple):
    """What a rank is to do: ``work`` is a pickled function with its arguments."""

    work: bytes
    number: int
    rank: int
    world_size: int
    port: int


class _Failure(NamedTuple):
    """A rank's exception, as text."""

    summary: str
    traceback: str


_ranks: list[_Standing] = []
_stores: list[dist.TCPStore] = []  # at most one, for all calls
_numbers = itertools.count()


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    """What ``function(*args)`` returns on every rank, in order; ``torch.distributed`` is initialised around it.

    The function may leave models and process groups behind, but nothing else: no patched module, no logger's sink.

    Raises
    ------
    RankError
        It failed on some rank, or did not end within ``TIMEOUT``.
    """
    work, number = pickle.dumps((function, args)), next(_numbers)
    ranks, port = _stand_ready(world_size), _store().port
    try:
        for rank, standing in enumerate(ranks):
            standing.channel.send(_Call(work, number, rank, world_size, port))
        return _collect([standing.channel for standing in ranks])
    except BaseException:
        _end_all()
        raise


def on_ranks(
    world_size: int | None = None, *, anew: bool = False, backend: str = "gloo"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """What the test does, each of so many ranks does, and asserts; else its own ``world_size`` says how many.

    They stand ready, or are launched ``anew``. An error on any of them fails the test, so none of them can be lost.
    """

    def made(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_each(**given: Any) -> None:
            run = functools.partial(launch, backend=backend) if anew else run_ranks
            run(functools.partial(test, **given), world_size=world_size or given["world_size"])

        test.__qualname__ += ".__wrapped__"  # by which it is pickled
        return on_each

    return made


def error_of(kind: Any, call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What the error says that this raises, of that kind or one of those: for a rank to return."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)


def fail_on(rank: int, how: str) -> None:
    """Raise, be killed or exit on this rank, for which the others wait."""
    if dist.get_rank() == rank:
        if how == "raise":
            raise ZeroDivisionError("no luck")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    dist.barrier()


def _stand_ready(world_size: int) -> Sequence[_Standing]:
    fork_server.start(("gossip",))
    context = multiprocessing.get_context("forkserver")
    while len(_ranks) < world_size:
        channel, theirs = context.Pipe()
        process = context.Process(target=_stand, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _ranks.append(_Standing(process, channel))
    return _ranks[:world_size]


def _store() -> dist.TCPStore:
    if not _stores:
        _stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _stores[0]


def _collect(channels: Sequence[Connection]) -> list[Any]:
    reports: dict[int, Any] = {}
    waiting: dict[Any, int] = {channel: rank for rank, channel in enumerate(channels)}
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for channel in ready:
            rank = waiting.pop(channel)
            try:
                reports[rank] = pickle.loads(channels[rank].recv_bytes())
            except EOFError:
                reports[rank] = _Failure("its process ended without a word", "")
            if isinstance(reports[rank], _Failure):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    failures = {rank: report for rank, report in reports.items() if isinstance(report, _Failure)}
    if failures or waiting:
        raise RankError(_describe(failures, sorted(waiting.values())))
    return [reports[rank] for rank in range(len(channels))]


def _describe(failures: Mapping[int, _Failure], silent: Sequence[int]) -> str:
    """Who failed first: what others say of a rank that is gone comes after it."""
    lines = [f"ranks {silent} had not ended"] if silent else []
    for rank, failure in sorted(failures.items(), key=lambda item: "ExchangeError" in item[1].summary):
        lines.append(f"rank {rank} failed: {failure.summary}\n{failure.traceback}")
    return "\n".join(lines)


@atexit.register
def _end_all() -> None:
    for standing in _ranks:
        standing.process.kill()
        standing.channel.close()
    for standing in _ranks:
        standing.process.join()
        standing.process.close()
    _ranks.clear()


def _stand(channel: Connection) -> None:
    """A rank's whole life."""
    faulthandler.enable()  # a rank that ends by a signal says where
    torch.set_num_threads(1)
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        while True:
            call = channel.recv()
            _leave()  # not before: a rank that closed its sockets at once could take a peer's last message with it
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(0)
            channel.send_bytes(_report(call))
    except (EOFError, OSError):
        os._exit(0)  # the test session is over


def _leave() -> None:
    gc.collect()  # models that were dropped
    if dist.is_initialized():
        dist.destroy_process_group()
    membership._num_worlds.clear()  # the next group has keys of its own
    if "torch.distributed.tensor" in sys.modules:  # DTensor remembers meshes, whose groups are gone
        from torch.distributed.tensor import _redistribute, debug

        for name, value in [*vars(debug).items(), *vars(_redistribute).items()]:  # their names differ by release
            if name.startswith(("_clear_", "clear_")):
                value()
            elif hasattr(value, "cache_clear"):
                value.cache_clear()


def _report(call: _Call) -> bytes:
    try:
        function, args = pickle.loads(call.work)  # imports its module, before the ranks have met
        before = _functions_and_constants()
        training_store._num_models = itertools.count(1000 * call.number)  # ranks have not had equally many calls
        store = dist.PrefixStore(f"call{call.number}", dist.TCPStore("127.0.0.1", call.port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world_size, timeout=TIMEOUT)
        result = pickle.dumps(function(*args))
        changed = [name for name, value in _functions_and_constants().items() if before.get(name, value) is not value]
        assert not changed, f"a later call would find changed what this one has patched: {changed}"
        return result
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        return pickle.dumps(_Failure(summary, traceback.format_exc()))


def _functions_and_constants() -> dict[str, Any]:
    """Those of all modules of the package that are imported."""
    return {
        f"{module.__name__}.{name}": value
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("gossip.")
        for name, value in vars(module).items()
        if callable(value) or name.isupper()
    }
