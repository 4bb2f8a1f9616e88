"""What is installed: the same wheel from the tree and from the sdist, with the configuration and both commands."""

import os
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml
from repository import CONFIGS, NOT_BUILT_FROM, REPOSITORY
from running import program

from gossip.compression.compiled_passes import quantized_by

pytestmark = pytest.mark.xdist_group("packaging")  # built once


def built(kind: str, source: Path, target: Path, **environment: str) -> Path:
    """The only file that a build leaves; no network is used."""
    build = (sys.executable, "-m", "build", "--no-isolation", f"--{kind}", f"--outdir={target}", str(source))
    program(*build, folder=source, environment=os.environ | environment)
    (file,) = target.iterdir()
    return file


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(REPOSITORY, folder / "tree", ignore=NOT_BUILT_FROM)
    return built("sdist", folder / "tree", folder / "built")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY, folder / "tree", ignore=NOT_BUILT_FROM)
    return built("wheel", folder / "tree", folder / "built")


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def compiled(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(".so")]


def test_every_version_that_is_claimed_is_tested_in_forks() -> None:
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    pythons = re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "tests.yml").read_text())
    rows = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert {row["python"] for row in rows} == set(pythons)
    pinned = re.findall(r"^torch==(.*)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    claimed = re.findall(r"\b2\.\d+\.\d\b", (REPOSITORY / "CONTRIBUTING.md").read_text())
    assert {row["torch"] for row in rows} == {*claimed, *pinned}


@pytest.mark.slow
def test_what_is_built_can_be_uploaded(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    said = program(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist), folder=tmp_path)
    assert said.count("PASSED") == 2


def test_packages_are_all_named_in_setup_cfg() -> None:
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    found = {
        ".".join(path.parent.relative_to(REPOSITORY).parts)
        for package in ("gossip", "topologies")
        for path in (REPOSITORY / package).rglob("__init__.py")
    }
    assert set(setup["options"]["packages"].split()) == found | {"gossip.lab.configs"}


def test_wheel_holds_every_module_and_the_configuration(wheel: Path) -> None:
    files = {path for package in ("gossip", "topologies") for path in (REPOSITORY / package).rglob("*.*")}
    files = {path for path in files if path.suffix not in (".c", ".so")}
    expected = {path.relative_to(REPOSITORY).as_posix(): path for path in files if "__pycache__" not in path.parts}
    expected["gossip_training.py"] = REPOSITORY / "gossip_training.py"
    expected |= {f"gossip/lab/configs/{path.relative_to(CONFIGS)}": path for path in CONFIGS.rglob("*.yaml")}
    packed = {name: data for name, data in content(wheel).items() if ".dist-info/" not in name}
    assert len(compiled(packed)) == (quantized_by() == "C")
    assert {name: data for name, data in packed.items() if name not in compiled(packed)} == {
        name: path.read_bytes() for name, path in expected.items()
    }


@pytest.mark.slow
def test_wheel_of_the_sdist_is_that_of_the_tree(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for folder in ("configs", "docs", "notebooks", "scripts", "tests"):
        assert any((source / folder).iterdir()), folder
    assert content(built("wheel", source, tmp_path / "built")) == content(wheel)
    shutil.rmtree(source / "build")
    without = content(built("wheel", source, tmp_path / "without a compiler", CC="false"))
    assert without.keys() >= {name for name in content(wheel) if name.endswith(".py")}
    assert compiled(without) == []
