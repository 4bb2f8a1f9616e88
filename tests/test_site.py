"""The documentation's site is built without a warning, and says what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples import code
from repository import REPOSITORY

import gossip
import topologies

DOCS = REPOSITORY / "docs"
MOST_LINES_OF_README = 200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-b", "html", "-d", str(tmp_path / "trees")]
    run = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "site" / "api" / "gossip.html").read_text()
    absent = [name for name in gossip.__all__ if name != "__version__" and f'id="gossip.{name}"' not in page]
    assert absent == []
    page = (tmp_path / "site" / "api" / "topologies.html").read_text()
    rooms = {"analysis", "families"}
    assert [name for name in topologies.__all__ if name not in rooms and f'id="topologies.{name}"' not in page] == []


def test_pages_link_to_what_is_there() -> None:
    for page in DOCS.glob("*.md"):
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
        own = [link for link in links if link and not link.startswith("http")]
        assert [link for link in own if not (DOCS / link).exists()] == [], page.name
        assert page.name == "notebooks.md" or not [link for link in own if link.startswith("notebooks/")], "copies"


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= MOST_LINES_OF_README


def test_citations_name_this_version() -> None:
    citation = (REPOSITORY / "CITATION.cff").read_text()
    assert f"\nversion: {gossip.__version__}\n" in citation
    assert f"version = {{{gossip.__version__}}}" in (REPOSITORY / "README.md").read_text()


def test_the_quickstart_has_the_code_of_the_readme() -> None:
    assert code("README.md", 0) == code("docs/quickstart.md", 0)
