"""What a wheel installs into an environment of nothing but Python."""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from repository import NOT_BUILT_FROM, REPOSITORY
from running import program

TINY = ("engine=virtual", "launch.world_size=4", "training.steps=20")


@pytest.mark.timeout(1200)
def test_a_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    """With what pip finds, as scripts/quickstart.sh does: tests look up no names otherwise."""
    dropped = ("PYTHON", "RES_OPTIONS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    run = partial(program, folder=tmp_path, environment=environment, patience_s=600)
    tree = tmp_path / "tree"
    shutil.copytree(REPOSITORY, tree, ignore=NOT_BUILT_FROM)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", f"--outdir={tmp_path}", folder=tree)
    shutil.rmtree(tree)
    (wheel,) = tmp_path.glob("*.whl")
    programs = tmp_path / "venv" / "bin"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", REPOSITORY / "constraints.txt")
    run(*pip, "setuptools")
    run(*pip, "--no-build-isolation", f"{wheel}[lab]")
    run(programs / "python", "-c", "import gossip, topologies")
    assert "one_peer_exponential" in run(programs / "topologies", "list")
    run(programs / "gossip", "train", *TINY, "hydra.run.dir=run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 20
