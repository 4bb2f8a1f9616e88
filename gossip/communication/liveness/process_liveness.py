"""Whether the process of another rank is alive, as far as this can be seen: on one machine."""

import os
from pathlib import Path
from typing import NamedTuple

GONE, SUSPENDED = "gone", "suspended"
_SUSPENDED_STATES = "Tt"


class Process(NamedTuple):
    """The unique identity of a process.

    Attributes
    ----------
    machine : str
        Equal for processes between which process ids are comparable; empty if there is no /proc to inspect.
    pid : int
        The process id.
    started_at : int
        The start time, in ticks of the machine, because a process id may be reused.
    host, port
        Where it listens for processes that watch for its end, see :mod:`gossip.communication.liveness.peer_liveness`.
        ``host`` is empty if it does not.
    """

    machine: str
    pid: int
    started_at: int
    host: str = ""
    port: int = 0


def own_process() -> Process:
    """Return the identity of this process."""
    pid = os.getpid()
    try:
        boot, number = namespaces("pid")
        return Process(f"{boot} {number}", pid, _stat(pid)[1])
    except (OSError, ValueError, IndexError):
        return Process("", pid, 0)


def namespaces(*kinds: str) -> list[str | int]:
    """Return what is equal in processes of one machine that share its namespaces of these kinds ("pid", "net").

    Raises
    ------
    OSError
        There is no /proc to inspect.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, *(os.stat(f"/proc/self/ns/{kind}").st_ino for kind in kinds)]


def own_network() -> list[str | int]:
    """Return a value that is equal in processes with the same loopback interface; empty if unknown."""
    try:
        return namespaces("net")
    except OSError:
        return []


def state_of(process: Process, here: Process) -> str:
    """Return ``GONE``, ``SUSPENDED`` (by SIGSTOP or a debugger), or "": it is alive, or not on this machine."""
    if not here.machine or process.machine != here.machine:
        return ""
    try:
        state, started_at = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    except (OSError, ValueError, IndexError):
        return ""
    if state in "ZXx" or started_at != process.started_at:
        return GONE
    return SUSPENDED if state in _SUSPENDED_STATES else ""


def is_suspended(pid: int) -> bool:
    """Return whether a process of this machine is suspended."""
    try:
        return _stat(pid)[0] in _SUSPENDED_STATES
    except (OSError, ValueError, IndexError):
        return False


def _stat(pid: int) -> tuple[str, int]:
    """Return state and start time; the process's name, in brackets, may contain anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
