"""The site: `bash scripts/docs.sh` builds it, and every warning is an error."""

import shutil
from pathlib import Path

from gossip.version import __version__

HERE = Path(__file__).parent
for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
    (HERE / "notebooks").mkdir(exist_ok=True)
    shutil.copyfile(notebook, HERE / "notebooks" / notebook.name)

project = "gossip-training"
author = "The gossip-training authors"
release = version = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "gossip-training"
html_static_path: list[str] = []

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks hold what they showed; a test executes them

numpydoc_show_class_members = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
nitpicky = True
nitpick_ignore = [("py:class", "collections.abc.Generator")]  # of an alias; no network is needed to build this


def link_within_the_site(_: object, __: str, source: list[str]) -> None:
    """Pages link to the notebooks where they are in the repository; on the site there are copies."""
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")


def setup(app: object) -> None:
    app.connect("source-read", link_within_the_site)  # type: ignore[attr-defined]
