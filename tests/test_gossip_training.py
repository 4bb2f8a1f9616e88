"""Another distribution that owns the name of one of the packages is found, and named in one line."""

import base64
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY

OURS = ("gossip/__init__.py", "gossip/errors.py", "topologies/__init__.py", "gossip_training.py")
INIT = 'import gossip_training\n\ngossip_training.check_files("gossip")\n'
CALLS = {"import": "import gossip", "gossip": "gossip_training.gossip()", "topologies": "gossip_training.topologies()"}


def record(folder: Path, name: str, files: tuple[str, ...]) -> None:
    """Write what pip notes of an installed distribution."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    rows = []
    for file in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256((folder / file).read_bytes()).digest()).decode().rstrip("=")
        rows.append(f"{file},sha256={digest},1\n")
    (info / "RECORD").write_text("".join(rows))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of installed packages with a small copy of ours, installed as pip would."""
    folder = tmp_path / "installed"
    for package in ("gossip", "topologies"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(INIT if package == "gossip" else "")
    (folder / "gossip" / "errors.py").touch()
    (folder / "topologies" / "__main__.py").write_text("def command():\n    print('runs')\n    return 0\n")
    (folder / "gossip" / "lab").mkdir()
    (folder / "gossip" / "lab" / "gossip_command.py").write_text("def main():\n    print('runs')\n    return 0\n")
    shutil.copy(REPOSITORY / "gossip_training.py", folder)
    record(folder, "gossip_training", (*OURS, "topologies/__main__.py", "gossip/lab/gossip_command.py"))
    return folder


def run(folder: Path, call: str, *before: Path) -> subprocess.CompletedProcess[str]:
    path = [str(entry) for entry in (*before, folder)]
    code = f"import sys\nsys.path[:0] = {path}\nimport gossip_training\nsys.exit({CALLS[call]})"
    code = code.replace("sys.exit(import gossip)", "import gossip")
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("call", CALLS)
def test_our_own_files_are_no_trouble(installed: Path, call: str) -> None:
    ended = run(installed, call)
    assert (ended.returncode, ended.stderr) == (0, "")


CASES = [("added.py", "import"), ("__init__.py", "gossip"), ("errors.py", "topologies")]


@pytest.mark.parametrize(("file", "call"), CASES)
def test_files_of_another_distribution_in_our_folder(installed: Path, file: str, call: str) -> None:
    """What is added or replaced; a file that both have is seen by what comes with it."""
    (installed / "gossip" / file).write_text("rumour = 1\n")
    (installed / "gossip" / "protocol.py").touch()
    record(installed, "rumours", (f"gossip/{file}", "gossip/protocol.py"))
    ended = run(installed, call)
    assert ended.returncode == 1
    (*_, line) = ended.stderr.splitlines()
    assert "the distribution rumours also owns the package gossip of gossip-training" in line
    assert "protocol.py" in line
    assert line.endswith("uninstall it, then run pip install --force-reinstall --no-deps gossip-training")
    assert call == "import" or len(ended.stderr.splitlines()) == 1


def test_another_package_that_comes_first_on_the_path(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "first" / "topologies").mkdir(parents=True)
    (tmp_path / "first" / "topologies" / "__init__.py").touch()
    ended = run(installed, "gossip", tmp_path / "first")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: another distribution also owns the package topologies")
    assert str(tmp_path / "first" / "topologies") in ended.stderr
