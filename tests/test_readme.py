"""The Python of the README and of the documentation's pages runs as it stands there."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples import code

ROOT = Path(__file__).parent.parent
CHECKPOINTS = "trained from step 60 to 100\nequal bit for bit: True"
PRINTED = {
    ("README.md", 0): "[array([[1.",
    ("docs/checkpoints.md", 0): CHECKPOINTS,
    ("docs/virtual_workers.md", 0): "1024 replicas",
    ("docs/simulation.md", 0): "ms a step",
}
BLOCKS = [code(page, number) for page, number in PRINTED]
EXPECTED = list(PRINTED.values())
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
EXTRAS = SETUP["options.extras_require"]
ADVICE = re.compile(r"(gossip(?:-training)?|\.)\[([a-z,]+)\](?=['\"`\s])")
"""An extra of this distribution, as pip is told it; ``gossip["x"]`` and ``gossip[5]`` are code."""


def names(requirements: str) -> set[str]:
    """The distributions of a list in setup.cfg."""
    return {re.split(r"[<>=]", line)[0] for line in requirements.split() if line}


DRIVER = """
import runpy, sys, traceback

for block in sys.argv[1:]:
    print("begins:", flush=True)
    try:
        runpy.run_path(block, run_name="__main__")
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        print("fails", flush=True)
"""
"""Runs one block after the other."""


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which Python finds of the extras' packages none that a plain installation lacks."""
    absent = set().union(*(names(EXTRAS[extra]) for extra in EXTRAS)) - names(SETUP["options"]["install_requires"])
    installed = importlib.metadata.packages_distributions().items()
    hidden = sorted(module for module, owners in installed if absent.issuperset(owners))
    assert {"matplotlib", "rich", "sklearn", "cvxpy"} <= set(hidden)
    folder = tmp_path_factory.mktemp("without_extras")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, without_extras: dict[str, str]) -> dict[str, list[str]]:
    """What each block prints, every time that it is run; one interpreter runs them all, and its workers are forked."""
    folder = tmp_path_factory.mktemp("readme")
    blocks = [*BLOCKS, *[block for block, text in zip(BLOCKS, EXPECTED, strict=True) if text == CHECKPOINTS]]
    scripts = [folder / f"block{number}.py" for number in range(len(blocks))]
    for script, block in zip(scripts, blocks, strict=True):
        script.write_text(block)
    (folder / "driver.py").write_text(DRIVER)
    run = subprocess.run(
        [sys.executable, "driver.py", *map(str, scripts)],
        cwd=folder,
        env=without_extras,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    _, *texts = run.stdout.split("begins:\n")
    assert (run.returncode, len(texts)) == (0, len(blocks)), run.stdout
    return {block: [text for other, text in zip(blocks, texts, strict=True) if other == block] for block in blocks}


@pytest.mark.slow
@pytest.mark.xdist_group("readme")  # the blocks are run once
@pytest.mark.parametrize(("block", "text"), list(zip(BLOCKS, EXPECTED, strict=True)), ids=[page for page, _ in PRINTED])
def test_readme_block_runs(block: str, text: str, printed: dict[str, list[str]]) -> None:
    assert len(printed[block]) == (
        2 if text == CHECKPOINTS else 1
    )  # what the first left must not pass for the second's
    for each in printed[block]:
        assert text in each
        assert not each.endswith("fails\n")


def test_readme_and_errors_name_extras_as_a_clone_has_them() -> None:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for folder in ("gossip", "topologies", "scripts", "configs", "notebooks"):
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".yaml", ".ipynb")]
    found = {
        (path, whose, extra)
        for path in paths
        for whose, extras in ADVICE.findall(path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert not [each for each in found if each[1] != "." or each[2] not in EXTRAS]
    named = {"weights", "plot", "lab", "tensorboard", "wandb", "mlflow", "bench", "accelerate", "lightning"}
    assert named | {"transformers"} <= {extra for _, _, extra in found}


def test_readme_names_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("http", "#"))]
    paths = re.findall(r"(?:scripts|configs|docs)/[\w./]+\w", text)
    missing = [path for path in {*links, *paths} if not (ROOT / path).exists()]
    assert not missing
    assert os.listdir(ROOT / "docs")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), [("docs/when_ranks_die.md", 0), ("docs/uneven_ranks.md", 0)])
def test_the_example_of_a_page_runs(page: str, number: int, tmp_path: Path, without_extras: dict[str, str]) -> None:
    script = tmp_path / "example.py"
    script.write_text(code(page, number).replace("model.close()", "print(model.members)\n    model.close()"))
    run = subprocess.run([sys.executable, script], env=without_extras, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("(0, 1, 2, 3)") == 4
