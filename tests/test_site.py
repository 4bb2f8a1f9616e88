"""The documentation's site is built without a warning, and says what is there."""

import ast
import configparser
import pickle
import re
import sys
from pathlib import Path

import pytest
from examples import code
from repository import REPOSITORY
from running import program

import gossip
import topologies

DOCS = REPOSITORY / "docs"
MOST_LINES_OF_README = 200
SETUP = configparser.ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg")
EXTRAS = SETUP["options.extras_require"]
ADVICE = re.compile(r"(gossip(?:-training)?|\.)\[([a-z,]+)\](?=['\"`\s])")
"""An extra of this distribution, as pip is told it; ``gossip["x"]`` and ``gossip[5]`` are code."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-b", "dummy", "-d", str(tmp_path)]
    program(sys.executable, "-m", "sphinx", *options, DOCS, tmp_path / "nothing", patience_s=500)
    described = pickle.loads((tmp_path / "environment.pickle").read_bytes()).domaindata["py"]["objects"]
    names = {f"gossip.{name}" for name in gossip.__all__} | {f"topologies.{name}" for name in topologies.__all__}
    modules = {"topologies.analysis", "topologies.families"}
    assert names - modules - {"gossip.__version__", "topologies.__version__"} - set(described) == set()


def test_pages_link_to_what_is_there() -> None:
    for page in DOCS.glob("*.md"):
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
        own = [link for link in links if link and not link.startswith("http")]
        assert [link for link in own if not (DOCS / link).exists()] == [], page.name
        assert page.name == "notebooks.md" or not [link for link in own if link.startswith("notebooks/")], "copies"


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= MOST_LINES_OF_README
    assert sum(map(bool, code("README.md", 0).splitlines())) == 10, "it calls them ten lines"


def texts_of(module: Path) -> str:
    """The texts in a module, with "…" for what is put into them."""
    nodes = list(ast.walk(ast.parse(module.read_text())))
    joined = [
        "…".join(each.value for each in node.values if isinstance(each, ast.Constant))
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    return "\n".join([*joined, *(str(node.value) for node in nodes if isinstance(node, ast.Constant))])


def test_messages_in_the_index_are_said_by_the_code() -> None:
    modules = [
        *(REPOSITORY / "gossip").rglob("*.py"),
        *(REPOSITORY / "topologies").rglob("*.py"),
        REPOSITORY / "gossip_training.py",
    ]
    said = "\n".join(map(texts_of, modules))
    index = (DOCS / "errors.md").read_text().partition("## By message")[2].partition("## Classes")[0]
    messages = re.findall(r"^\| `([^`]*)` \|", index, re.MULTILINE)
    assert len(messages) > 40
    assert [message for message in messages if not all(part in said for part in re.split(r" ?… ?", message))] == []


def test_citations_name_this_version() -> None:
    citation = (REPOSITORY / "CITATION.cff").read_text()
    assert f"\nversion: {topologies.__version__}\n" in citation
    assert f"version = {{{gossip.__version__}}}" in (REPOSITORY / "README.md").read_text()


def test_the_quickstart_has_the_code_of_the_readme() -> None:
    assert code("README.md", 0) == code("docs/quickstart.md", 0)


def test_readme_and_errors_name_extras_as_a_clone_has_them() -> None:
    paths = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]
    for folder in ("gossip", "topologies", "scripts", "configs", "notebooks"):
        paths += [path for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", ".sh", ".yaml", ".ipynb")]
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
    text = (REPOSITORY / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith(("http", "#"))]
    paths = re.findall(r"(?:scripts|configs|docs)/[\w./]+\w", text)
    missing = [path for path in {*links, *paths} if not (REPOSITORY / path).exists()]
    assert not missing
