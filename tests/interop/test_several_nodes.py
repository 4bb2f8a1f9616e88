"""What the page about several nodes says of torchrun, as it stands there; test_slurm.py has its batch script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from examples import code
from free_ports import free_port
from repository import REPOSITORY

TEXT = (REPOSITORY / "docs" / "several_nodes.md").read_text()


def test_two_agents_of_torchrun_on_one_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code("docs/several_nodes.md", 0))
    (command,) = re.findall(r"^    torchrun (--nnodes 2 .* train\.py 4)$", TEXT, re.MULTILINE)
    words = command.replace("node1:29500", f"127.0.0.1:{free_port()}").split()
    words = [str(Path(sys.executable).parent / "torchrun"), *words]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    agents = [subprocess.Popen(words, **options) for _ in range(2)]
    try:
        outputs = [agent.communicate(timeout=100) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert "4 ranks: [[1." in "".join(output for output, _ in outputs)
