"""Whether the process of another rank still lives, where this can be seen: on one machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

GONE, SUSPENDED = "gone", "suspended"
_SUSPENDED_STATES = "Tt"


class Process(NamedTuple):
    """A process that nothing else is ever taken for.

    Attributes
    ----------
    machine : str
        Equal where process ids mean the same; empty where there is no /proc to look at.
    pid : int
    started_at : int
        In ticks of the machine: a number may be given away again.
    host, port
        Where it listens for those that want to see it end: see :mod:`gossip.communication.lifelines`. ``host`` is empty
        where it does not.
    """

    machine: str
    pid: int
    started_at: int
    host: str = ""
    port: int = 0


def own_process() -> Process:
    """This one."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Process(f"{boot} {os.stat('/proc/self/ns/pid').st_ino}", pid, _stat(pid)[1])
    except (OSError, ValueError, IndexError):
        return Process("", pid, 0)


def state_of(process: Process, here: Process) -> str:
    """``GONE``, ``SUSPENDED`` (by SIGSTOP or a debugger), or nothing: it lives, or is not on this machine."""
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
    """Whether a process of this machine is."""
    try:
        return _stat(pid)[0] in _SUSPENDED_STATES
    except (OSError, ValueError, IndexError):
        return False


def _stat(pid: int) -> tuple[str, int]:
    """State and time of its start; its name, in brackets, may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
