"""Signals that a terminal or SLURM sends to all processes of a run reach those that know what to do with them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gossip import launch

FOR_ALL = {signal.SIGINT, signal.SIGUSR1}


def signals_of(status: Path, field: str) -> set[signal.Signals]:
    """One of the masks that Linux writes in hexadecimal digits; the ones of ``FOR_ALL`` in it."""
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    mask = int(line.split()[1], 16)
    return {number for number in FOR_ALL if mask >> (number - 1) & 1}


def worker_and_its_parent() -> tuple[int, set[signal.Signals], set[signal.Signals], set[signal.Signals]]:
    own, parent = Path("/proc/self/status"), Path(f"/proc/{os.getppid()}/status")
    return os.getppid(), signals_of(own, "SigIgn"), signals_of(own, "SigBlk"), signals_of(parent, "SigBlk")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux: /proc tells what a process blocks")
def test_fork_server_blocks_what_ends_a_run_and_workers_leave_ctrl_c_to_the_launcher() -> None:
    fork_server, ignored, blocked, blocked_by_the_fork_server = launch(worker_and_its_parent, world_size=2)[0]
    assert fork_server != os.getpid()
    assert blocked_by_the_fork_server == FOR_ALL  # before its imports are over as well: it inherits them
    assert signal.SIGINT in ignored
    assert signal.SIGUSR1 not in ignored | blocked
