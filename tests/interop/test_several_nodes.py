"""What the page about several nodes says of torchrun, as it stands there; test_slurm.py has its batch script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from examples import code
from free_ports import free_port
from lab_hosts import why_no_hosts
from repository import REPOSITORY

from gossip.lab.benchmarks.network.shaped_hosts import Lab

TEXT = (REPOSITORY / "docs" / "several_nodes.md").read_text()
TIMEOUT_S = 100


def torchrun(node: str, port: int, *options: str) -> list[str]:
    """The page's command for each of two nodes."""
    (command,) = re.findall(r"^    torchrun (--nnodes 2 .* train\.py 4)$", TEXT, re.MULTILINE)
    words = command.replace("node1:29500", f"{node}:{port}").split()
    return [str(Path(sys.executable).parent / "torchrun"), *options, *words]


def addressed(host: int) -> list[str]:
    """Options where names of hosts resolve to nothing."""
    return [f"--local-addr=10.77.0.{host + 1}", f"--rdzv-conf=is_host={host == 0}".lower()]


def outcome(agents: Sequence[subprocess.Popen[str]]) -> str:
    try:
        outputs = [agent.communicate(timeout=TIMEOUT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0] * len(agents), outputs
    return "".join(output for output, _ in outputs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(code("docs/several_nodes.md", 0))
    return tmp_path


def test_two_agents_of_torchrun_on_one_machine(folder: Path) -> None:
    command = torchrun("127.0.0.1", free_port())
    options = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    assert "4 ranks: [[1." in outcome([subprocess.Popen(command, **options) for _ in range(2)])


@pytest.mark.root
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_two_agents_of_torchrun_on_hosts_of_their_own(folder: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    lab = Lab(2)
    try:
        agents = []
        for host in range(2):
            with lab.entered(host):
                agents.append(
                    subprocess.Popen(
                        torchrun("10.77.0.1", 29500, *addressed(host)),
                        cwd=folder,
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
        assert "4 ranks: [[1." in outcome(agents)
    finally:
        lab.close()
