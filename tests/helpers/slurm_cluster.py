"""A SLURM cluster of one node on this machine, with files, ports and keys of its own, that ends with its block."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from free_ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "sinfo", "scancel", "scontrol")
NODE = "localhost"  # SLURM's name of the node, which is looked up as a host's
_START_S, _END_S = 60, 10

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
KillWait=30
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes={node} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no cluster on this machine; None if there can."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    missing = [program for program in PROGRAMS if _path(program) is None]
    return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)" if missing else None


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Within the block a cluster runs, with all its files in an empty folder of a short path; SLURM's environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment["SLURM_CONF"] = _configure(folder)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(_daemon(munged, environment))
        _wait_until((folder / "munge.socket").exists, "munged makes its socket", folder)
        daemons.enter_context(_daemon(["slurmctld", "-D"], environment))
        daemons.enter_context(_daemon(["slurmd", "-D", "-N", NODE], environment))
        _wait_until(lambda: _says(environment, "sinfo", "-h", "-o", "%T") == "idle", "the node is idle", folder)
        try:
            yield environment
        finally:
            subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], env=environment, check=False)
            _wait_until(lambda: _says(environment, "squeue", "-h", "-s") == "", "all steps have ended", folder)


def _configure(folder: Path) -> str:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    path = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    text = _CONFIGURATION.format(
        folder=folder, host=host, node=NODE, controller_port=free_port(), node_port=free_port()
    )
    path.write_text(text)
    return str(path)


def _path(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def _daemon(command: list[str], environment: Mapping[str, str]) -> Iterator[None]:
    program = _path(command[0])
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([program, *command[1:]], env=environment, start_new_session=True, **silent) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _says(environment: Mapping[str, str], *command: str) -> str | None:
    """What a command prints; None while it fails."""
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def _wait_until(condition: Callable[[], bool], what: str, folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
            raise TimeoutError(f"not within {_START_S} s: {what}\n{logs}")
        time.sleep(0.05)
