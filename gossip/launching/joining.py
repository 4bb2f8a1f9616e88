"""Processes that were started externally, by torchrun or SLURM's srun: their ranks and their process group."""

import contextlib
import dataclasses
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from gossip.communication import training_store
from gossip.errors import LaunchError, reason
from gossip.launching import slurm
from gossip.launching.rendezvous import STORE, Rendezvous, connect, find_rendezvous, listen, meet, serve

DEFAULT_TIMEOUT = timedelta(minutes=5)
_PAUSE_S = 0.05
_STRANGER_PATIENCE_S = 10.0  # between the start of a store and its first key

_joins = itertools.count()  # joins of this process; all ranks join equally often
_stores: dict[tuple[str, int], dist.Store] = {}
"""Stores of steps by host and port. A process that joins again reuses its own, as peers may still be connected."""


@dataclass(frozen=True)
class Placement:
    """This process's place among ranks that were started externally."""

    rank: int
    world_size: int
    variables: str  # of the environment that say so, with their values
    step: slurm.Step | None = None  # of SLURM, if srun started the process
    rendezvous: Rendezvous | None = None  # where its group, whose ranks these are then, meets the others

    @property
    def num_local_ranks(self) -> int:
        """The number of ranks on this node, by SLURM or ``LOCAL_WORLD_SIZE``."""
        return self.step.num_local_tasks if self.step else int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))


def find_placement(environment: Mapping[str, str] = os.environ) -> Placement | None:
    """Return this process's place if it is a rank that was started externally; None if it starts ranks itself.

    It is one if ``RANK`` and ``WORLD_SIZE`` are set, or in a SLURM step with several tasks, see
    :func:`gossip.launching.slurm.step_of`, or if ``GOSSIP_STORE`` is set. ``environment`` is this process's by default.

    Raises
    ------
    ValueError
        A variable has an invalid value.
    """
    rendezvous, placement = find_rendezvous(environment), _place_in_group(environment)
    if rendezvous is None:
        return placement
    if placement is None:
        return Placement(0, 1, f"{STORE}={environment[STORE]}", rendezvous=rendezvous)
    return dataclasses.replace(placement, rendezvous=rendezvous)


def _place_in_group(environment: Mapping[str, str]) -> Placement | None:
    step: slurm.Step | None = None
    names = ("RANK", "WORLD_SIZE")
    if not set(names) <= environment.keys():
        step = slurm.step_of(environment)
        if step is None:
            return None
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    variables = " and ".join(f"{name}={environment[name]}" for name in names)
    if not all(environment[name].isdecimal() for name in names):
        raise ValueError(f"{variables} are set, but must be numbers; unset them to start ranks here")
    rank, world_size = (int(environment[name]) for name in names)
    return Placement(rank, world_size, variables, step)


@contextlib.contextmanager
def joined_process_group(*, backend: str = "gloo", timeout: timedelta = DEFAULT_TIMEOUT) -> Iterator[None]:
    """Make this process a member of the group of all externally started ranks within the block. Collective.

    Under SLURM's srun, the environment within the block holds the variables that torchrun sets for its ranks (``RANK``,
    ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), and torch uses the CPUs of
    one task.

    With ``GOSSIP_STORE`` set, they meet there, and a rank that comes later joins the training of the others with a
    group of its own; ``RANK`` and ``WORLD_SIZE`` are those of the group.

    The store's keys carry the number of the attempt; otherwise the keys of an attempt that died would be mistaken for
    those of this one (pytorch #135712).

    Raises
    ------
    LaunchError
        The address of a step's first host is unknown, the port for its store is taken, or a rank ended meanwhile.
    """
    placement = find_placement()
    with contextlib.ExitStack() as stack:
        if placement is not None and placement.step is not None:
            stack.enter_context(_variables_of_torchrun(placement.step))
        if placement is not None and placement.rendezvous is not None:
            store, rank, world_size = _met(placement, timeout)
            stack.enter_context(environment_set({"RANK": rank, "WORLD_SIZE": world_size}))
        else:
            store, rank, world_size = _own_group(placement, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        try:
            _await_all(store, rank, world_size, timeout)
            yield
            if not training_store.has_left:
                training_store.note_outcome(training_store.COMPLETED)
        finally:
            dist.destroy_process_group()
        if placement is not None and placement.step is not None:
            _leave(store, placement, timeout)


def join_training(store: dist.Store | str | None = None, *, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Let this process join a running training with ``on_peer_loss="continue"``, or found one that others can join.

    It replaces ``init_process_group``. Then wrap the model in the same way as on the ranks that train.

    A process that joins has a process group of its own; the ranks of a shard group initialise one of the group first,
    and all of them join. It takes over the parameters and the optimizer's state from one of the ranks, which continue
    training meanwhile. When construction returns, this process is one of the ranks, and ``model.step`` is its first
    step.

    Without ``store``, processes meet at the store that the environment variable ``GOSSIP_STORE`` names (``host:port``
    of ``gossip store``, or ``host:port/name`` if several trainings use it). Of these, ``GOSSIP_GROUPS`` found the
    training in a common process group, or, at the ``timeout``, more than half of so many; ``GOSSIP_GROUPS=2:4`` asks
    for 2 then. Whoever comes later, or comes back, joins them.

    Parameters
    ----------
    store : Store or str, optional
        The key-value store of a running training, or the host and port of its TCPStore ("10.0.0.1:29500").
    timeout : timedelta
        The time-out of the store, and of the wait for others.

    Raises
    ------
    ValueError
        ``store`` is not an address, or neither it nor a valid ``GOSSIP_STORE`` is given.
    LaunchError
        No store was found at the address, or too few processes came within the time-out.
    """
    if store is None:
        placement = find_placement()
        if placement is None or placement.rendezvous is None:
            raise ValueError(
                f"store was not given, and the environment variable {STORE} is not set; set it to the host:port of "
                "`gossip store`, or pass the address of a running training's store"
            )
        store, rank, world_size = _met(placement, timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        return
    if isinstance(store, str):
        host, _, port = store.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f'store must be a torch.distributed.Store or "host:port", got {store!r}')
        store = connect(store, timeout)
    training_store.begin(store)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _met(placement: Placement, timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Meet the other ranks; return store, rank and size of the process group: the founders', or one of its own."""
    assert placement.rendezvous is not None
    place, size = placement.rank, placement.world_size
    own = _own_group(placement, timeout)[0] if size > 1 else dist.HashStore()
    met = meet(placement.rendezvous, timeout, dist.PrefixStore("meeting", own), place, size)
    return (own, place, size) if met.rank is None else (met.store, met.rank, met.num_founders)


def _own_group(placement: Placement | None, timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return store, rank and size of the group of ranks that torchrun or srun has started together."""
    if placement is None or placement.step is None:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    else:
        rank, world_size, step = placement.rank, placement.world_size, placement.step
        store, attempt = _store_of(step, _address_of(step), timeout), f"{step.job}.{step.step}.{step.restarts}"
    return dist.PrefixStore(f"attempt{attempt}/{next(_joins)}", store), rank, world_size


def _address_of(step: slurm.Step) -> tuple[str, int]:
    """Return host and port of the store, as set by the user or derived from the step."""
    host = os.environ.get("MASTER_ADDR", step.first_host)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise LaunchError(
            f"the address of {host}, the first host of step {step.job}.{step.step}, is not known ({error.strerror}); "
            "set MASTER_ADDR to one that all nodes can resolve"
        ) from error
    return host, int(os.environ.get("MASTER_PORT", step.port))


def _store_of(step: slurm.Step, address: tuple[str, int], timeout: timedelta) -> dist.Store:
    """Return the store of a step: the first task serves it and enters the step's name, and all tasks connect to it."""
    if address not in _stores:
        name = f"step {step.job}.{step.step}.{step.restarts}"
        if step.keeps_store:
            store = serve(address[0], _listener(step, *address), timeout)
            store.set(name, "")
        else:
            store = connect(f"{address[0]}:{address[1]}", timeout)
        deadline = time.monotonic() + _STRANGER_PATIENCE_S
        while not store.check([name]):
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"port {address[1]} on {address[0]} is another program's key-value store, not that of step "
                    f"{step.job}.{step.step}; set MASTER_PORT to another one before srun"
                )
            time.sleep(_PAUSE_S)
        _stores[address] = store
    return _stores[address]


def _listener(step: slurm.Step, host: str, port: int) -> socket.socket:
    """Open the listening socket; for tasks on one node, only on the address by which they know it."""
    try:
        if step.num_nodes == 1:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family)
        return listen(port)
    except OSError as error:
        raise LaunchError(
            f"port {port} on {host}, where step {step.job}.{step.step} would keep its key-value store, cannot be used: "
            f"{error.strerror}; set MASTER_PORT to another one before srun"
        ) from error


@contextlib.contextmanager
def environment_set(variables: Mapping[str, object]) -> Iterator[None]:
    """Set environment variables within the block."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _variables_of_torchrun(step: slurm.Step) -> Iterator[None]:
    """Set environment and threads within the block as torchrun and :func:`gossip.launch` do for their ranks."""
    host, port = _address_of(step)
    variables: dict[str, object] = {
        "RANK": step.task,
        "LOCAL_RANK": step.local_task,
        "WORLD_SIZE": step.num_tasks,
        "LOCAL_WORLD_SIZE": step.num_local_tasks,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    if step.num_nodes == 1 and os.path.exists("/sys/class/net/lo"):
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    num_threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(num_threads, _cpus_of_one_task(step)))
    try:
        with environment_set(variables):
            yield
    finally:
        torch.set_num_threads(num_threads)


def _cpus_of_one_task(step: slurm.Step) -> int:
    per_task, on_node = (os.environ.get(name, "") for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"))
    if per_task.isdecimal():
        return max(1, int(per_task))
    on_node_count = int(on_node) if on_node.isdecimal() else os.cpu_count() or 1
    return max(1, on_node_count // step.num_local_tasks)


def _await_all(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Wait until all have opened their connections: a rank that has nothing to do may leave, and close its own."""
    if store.add("entered", 1) == world_size:
        store.set("all entered", "")
    try:
        store.wait(["all entered"], timeout)
    except RuntimeError as error:
        raise LaunchError(
            f"rank {rank}: another of {world_size} ranks ended while the process group was made: {reason(error)}; look "
            "for its error in the output of torchrun or srun"
        ) from error


def _leave(store: dist.Store, placement: Placement, timeout: timedelta) -> None:
    """Leave; the rank that serves the store leaves last, since others may still use it."""
    assert placement.step is not None
    with contextlib.suppress(RuntimeError):  # a rank that died never leaves, and a store that is gone is not needed
        num_left = store.add("left", 1)
        deadline = time.monotonic() + timeout.total_seconds()
        while placement.step.keeps_store and num_left < placement.world_size and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            num_left = store.add("left", 0)
