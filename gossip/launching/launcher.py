"""Workers on this machine, forked from a preloaded fork server, or this process as an externally started one.

The launching process serves the key-value store, so that the store outlives every rank, and workers depend on the
launcher: a worker exits when its launcher is gone, for whatever reason.
"""

import contextlib
import errno
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import FrameType
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from gossip.communication.authenticated_store import VARIABLE as KEY
from gossip.communication.host.local_size import LOCAL_SIZE
from gossip.communication.host.open_files import limit_named
from gossip.communication.waiting import checked_timeout
from gossip.errors import CannotJoinError, EndedTogether, ExchangeError, LaunchError, causes, names_arguments
from gossip.launching import fork_server
from gossip.launching.joining import (
    DEFAULT_TIMEOUT,
    environment_set,
    find_placement,
    join_training,
    joined_process_group,
)
from gossip.launching.rendezvous import serve
from gossip.launching.worker_reports import Failure, collect
from topologies.command_lines import MEANT
from topologies.validation import check_integer, check_local_size

_TERMINATE_GRACE_S = 1.0
_EXIT_GRACE_S = 5.0
_PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")

_is_worker = False  # set in the processes that launch() starts
_worker_pids: list[int] = []  # of the running launch


@dataclass(frozen=True)
class _Job:
    """What every worker runs, and what it needs to join the process group."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    port: int
    backend: str
    timeout: timedelta
    num_threads: int
    local_size: int | None
    key: str | None = field(repr=False)


@limit_named()
@names_arguments(dict.fromkeys(MEANT, "is called world_size here"))
def launch(
    function: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    local_size: int | None = None,
    backend: str = "gloo",
    port: int | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    num_threads: int | None = None,
    preload: Sequence[str] = ("gossip",),
    on_peer_loss: Literal["raise", "continue"] = "raise",
    restart: int = 0,
) -> list[Any]:
    """Run ``function(*args)`` on every rank of a new process group and return the ranks' results in order.

    If the ranks were started externally, no workers are started: this process joins the group, runs the function as its
    one rank, and the list holds its one result; an exception is printed and ends the process. This is the case under
    torchrun (``RANK`` and ``WORLD_SIZE`` are set) and in a SLURM step with several tasks (``srun -n 4 python ...``),
    where the function finds the variables that torchrun sets. ``MASTER_ADDR`` is the step's first host unless it is
    set, and ``MASTER_PORT`` is derived from the ids of job and step. In a batch script without srun, in the shell of an
    allocation and in a step with one task, workers are started here.

    Parameters
    ----------
    function : callable
        An importable function (pickled by name); it runs with ``torch.distributed`` initialised.
    *args
        Its arguments, pickled.
    world_size : int, optional
        The number of workers, all on this machine; by default one for each core that this process may use. Ranks that
        were started externally need not be counted here; a number that is not theirs is refused.
    local_size : int, optional
        How many consecutive ranks :func:`gossip.make_shard_mesh` puts into a group, to train one replica together; by
        default those of a node. It does not change which ranks share a machine.
    backend : str
        The backend of torch.distributed, or one per type of device ("cpu:gloo,cuda:nccl"). A third-party backend must
        be registered by what a worker imports for ``function``.
    port : int, optional
        The port of the store on 127.0.0.1; a free one by default.
    timeout : timedelta
        The time-out of the process group.
    num_threads : int, optional
        The number of torch threads per worker; by default the machine's cores divided by ``world_size``, at least 1.
    preload : sequence of str
        Modules that the fork server imports before the first worker starts, see ``gossip.launching.fork_server.start``.
    on_peer_loss : str
        "raise": a failing worker ends all workers. "continue": the others continue, for models with
        ``GossipDataParallel(..., on_peer_loss="continue")``, and a warning reports how the worker ended. SIGTERM is
        passed on to the workers, if the program does not handle it. It has no effect on ranks that were started
        externally.
    restart : int
        With "continue": how many times a failed worker is started again while others train. It runs the function from
        the beginning, in a process group of its own, and its model joins the others (:func:`gossip.join_training`).
        With ``local_size`` all workers of a group are started again together, once all of them have ended.

    Returns
    -------
    list
        The return values of the ranks, by rank; with "continue", None for those that failed permanently.

    Raises
    ------
    ValueError
        ``world_size``, ``local_size``, ``timeout``, ``port``, ``num_threads`` or ``restart`` is out of range,
        ``world_size`` is not that of the externally started ranks, or torch was built without ``backend``.
    TypeError
        ``function`` or ``args`` cannot be pickled, ``timeout`` is not a timedelta, or a number is not an integer.
    RuntimeError
        The call was made inside a worker, or while a worker imported the calling script, which lacks ``if __name__ ==
        "__main__":``.
    SystemExit
        All ranks have saved and ended, with status 143, since they received SIGTERM.
    LaunchError
        The port is taken, the address of a step's first host is unknown, or a worker failed (with "continue", all of
        them); the other workers have been ended by then.
    """
    if _is_worker:
        raise RuntimeError("gossip.launch was called inside a worker of gossip.launch; workers start no workers")
    checked_timeout(timeout)
    placement = find_placement()
    num_cores = len(os.sched_getaffinity(0))
    if world_size is None:
        world_size = num_cores if placement is None else placement.world_size
    if local_size is not None:
        check_local_size(local_size, world_size)
    _check_failures(on_peer_loss, restart)
    if placement is not None:
        if placement.world_size != world_size:
            raise ValueError(
                f"world_size is {world_size}, but this process is rank {placement.rank} of {placement.world_size}, "
                f"because {placement.variables} are set in its environment; unset them to start {world_size} workers "
                f"here, or pass world_size={placement.world_size}"
            )
        with joined_process_group(backend=backend, timeout=timeout), _local_size_set(local_size):
            try:
                return [function(*args)]
            except (Exception, KeyboardInterrupt) as error:
                traceback.print_exc()
                _leave_at_once(130 if isinstance(error, KeyboardInterrupt) else 1)
    _check_arguments(function, args, world_size, port, num_threads)
    _check_backend(backend)

    listener = _listen(port)
    port = listener.getsockname()[1]
    store = serve("127.0.0.1", listener, timeout)
    job = _Job(
        function=function,
        args=args,
        world_size=world_size,
        port=port,
        backend=backend,
        timeout=timeout,
        num_threads=num_threads or max(1, num_cores // world_size),
        local_size=local_size,
        key=os.environ.get(KEY),
    )
    context = multiprocessing.get_context("forkserver")
    fork_server.start(preload)
    workers: list[ForkServerProcess] = []
    channels: list[Connection] = []

    def start(rank: int, attempt: int = 0) -> None:
        channel, theirs = context.Pipe()
        process = context.Process(target=_work, args=(job, rank, theirs, attempt), name=f"rank{rank}", daemon=False)
        process.start()
        theirs.close()
        assert process.pid is not None
        _worker_pids.append(process.pid)
        workers.append(process)
        channels.append(channel)

    try:
        for rank in range(world_size):
            start(rank)
        start_again = start if on_peer_loss == "continue" else None
        is_unhandled = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # by the program
        with signals_for_workers([signal.SIGTERM] if start_again is not None and is_unhandled else ()):
            results = collect(workers, channels, start_again, restart, group_size=local_size or 1)
        for channel in channels:
            with contextlib.suppress(OSError):  # it has reported, so its work is done whatever has happened since
                channel.send_bytes(b"leave")
        deadline = time.monotonic() + _EXIT_GRACE_S
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
    finally:
        _worker_pids.clear()
        for channel in channels:
            channel.close()  # a worker that is still busy exits, however it handles signals
        _end(workers)
        del store
    return results


@contextlib.contextmanager
def signals_for_workers(numbers: Sequence[int]) -> Iterator[None]:
    """Let the workers of :func:`launch` react to these signals in place of this process within the block. Local.

    If the launch fails after one of them, or one comes while there are no workers, this process ends as the signal
    would have ended it.
    """
    came: list[int] = []

    def forward(signal_number: int, _: FrameType | None) -> None:
        if not _worker_pids:
            raise SystemExit(128 + signal_number)
        for pid in _worker_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        came.append(signal_number)

    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as at_end:
        for number in numbers if is_main else ():
            at_end.callback(signal.signal, number, signal.signal(number, forward))
        try:
            yield
        except LaunchError:
            if came:  # they ended workers that were not training yet, or that could not agree in time
                raise SystemExit(128 + came[0]) from None
            raise


def _check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], world_size: int, port: int | None, num_threads: int | None
) -> None:
    check_integer("world_size", world_size, minimum=1)
    if port is not None and not 0 <= port < 2**16:
        raise ValueError(f"port must be from 0 to 65535, got {port}; leave it out to use a free one")
    if num_threads is not None:
        check_integer("num_threads", num_threads, minimum=1)
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "gossip.launch was reached while a worker imported the script that calls it; put the call under "
            'if __name__ == "__main__":'
        )
    try:
        pickle.dumps((function, args))
    except Exception as error:
        raise TypeError(
            f"function {getattr(function, '__qualname__', function)!r} or its arguments cannot be pickled ({error}); "
            "define the function at the top level of a module or script, and pass plain data"
        ) from error
    main = sys.modules["__main__"]
    if getattr(function, "__module__", None) == "__main__" and not os.path.exists(
        getattr(main, "__file__", None) or ""
    ):
        raise TypeError(
            f"function {function.__qualname__!r} was defined in an interactive session, from which workers cannot "
            "import it; put it into a file"
        )


def _local_size_set(local_size: int | None) -> contextlib.AbstractContextManager[None]:
    """Tell :func:`gossip.make_shard_mesh` within a block."""
    return environment_set({} if local_size is None else {LOCAL_SIZE: local_size})


def _check_failures(on_peer_loss: str, restart: int) -> None:
    if on_peer_loss not in ("raise", "continue"):
        raise ValueError(f'on_peer_loss must be "raise" or "continue", got {on_peer_loss!r}')
    check_integer("restart", restart, minimum=0)
    if restart and on_peer_loss == "raise":
        raise ValueError(
            f'restart={restart} needs other ranks that continue and can be joined; pass on_peer_loss="continue" '
            'here and in GossipDataParallel, got "raise"'
        )


def _check_backend(backend: str) -> None:
    built = {
        name: available()
        for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
        if (available := getattr(dist, f"is_{name}_available", None)) is not None
    }
    for item in backend.lower().split(","):
        name = item.rpartition(":")[2]
        if not built.get(name, True):  # a name that is not listed may be registered in the workers
            raise ValueError(
                f"backend {name!r} is not built into this torch ({torch.__version__}); it has "
                f"{', '.join(name for name, is_built in built.items() if is_built)}"
            )


def _listen(port: int | None) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port or 0))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(f"port {port} on 127.0.0.1 cannot be used: {error.strerror}") from error
        raise LaunchError(
            f"port {port} on 127.0.0.1 is taken; choose another one, or leave it out to use a free one"
        ) from None


def _end(workers: Sequence[ForkServerProcess]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.terminate()
    deadline = time.monotonic() + _TERMINATE_GRACE_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
        if worker.is_alive():
            worker.kill()
        worker.join()
        worker.close()


def _work(job: _Job, rank: int, channel: Connection, attempt: int) -> None:
    """Run a worker: join the group, call the function, report, wait for all the others, exit.

    In a later ``attempt`` the others have already started, and the worker, or its shard group, joins their training.
    """
    global _is_worker
    _is_worker = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher receives it too, and ends the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the fork server blocks it
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # nothing is lost if the process is ended
    may_leave = threading.Event()
    threading.Thread(target=_leave_with_launcher, args=(channel, may_leave), name="launcher-watch", daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.pop(KEY, None)  # the fork server may have been started with another one
    if job.key is not None:
        os.environ[KEY] = job.key
    torch.set_num_threads(job.num_threads)
    try:
        with limit_named(), _local_size_set(job.local_size):
            store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=job.timeout)
            if attempt:
                group, place = divmod(rank, group_size := job.local_size or 1)
                if group_size > 1:
                    _init(job, dist.PrefixStore(f"group{group}/attempt{attempt}", store), place, group_size)
                join_training(store)
            else:
                _init(job, store, rank, job.world_size)
            report = _pickled_result(job.function(*job.args))
    except BaseException as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        named = (each.failed_ranks for each in causes(error) if isinstance(each, ExchangeError))
        blames = next(filter(None, named), ())  # ranks that have stopped
        secondary = bool(blames) or any(words in summary for words in _PEER_IS_GONE)
        exit_status = int(str(error)) if isinstance(error, EndedTogether) else None
        is_final = isinstance(error, CannotJoinError | EndedTogether)
        failure = Failure(summary, traceback.format_exc(), secondary, blames, is_final, exit_status)
        channel.send_bytes(pickle.dumps(failure))
        _leave_at_once(1)
    channel.send_bytes(report)
    may_leave.wait()  # closing the sockets now could lose a peer's last message
    if dist.is_initialized():  # the function may have ended it
        dist.destroy_process_group()


def _init(job: _Job, store: dist.Store, rank: int, size: int) -> None:
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=size, timeout=job.timeout)


def _pickled_result(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"its result cannot be pickled ({error}); return plain data") from error


def _leave_with_launcher(channel: Connection, may_leave: threading.Event) -> None:
    """End this process when the launcher is gone or has abandoned it, unless it has been told that it may leave."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    if channel in wait([channel, launcher.sentinel]):
        with contextlib.suppress(EOFError, OSError):
            channel.recv_bytes()
            may_leave.set()
            launcher.join()
    _leave_at_once(1)


def _leave_at_once(status: int) -> NoReturn:
    """Exit without the interpreter's shutdown, which communication that can no longer finish would block."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
