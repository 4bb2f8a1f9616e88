"""The site: `bash scripts/docs.sh` builds it, and every warning is an error."""

import re
import shutil
import sys
from pathlib import Path

from topologies.version import __version__

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for family_gallery and mathml, beside this file
for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
    (HERE / "notebooks").mkdir(exist_ok=True)
    shutil.copyfile(notebook, HERE / "notebooks" / notebook.name)

project = "gossip-training"
author = "The gossip-training authors"
release = version = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc", "family_gallery", "mathml"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "gossip-training"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_copyright = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks hold what they showed; a test executes them

numpydoc_show_class_members = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
nitpicky = True
nitpick_ignore = [("py:class", "collections.abc.Generator")]  # of an alias; no network is needed to build this

LISTS = ("index", "algorithms", "extending")
"""Pages whose lists of links, ``- [title](page.md): what it has``, are the site's navigation too."""


def with_navigation(text: str) -> str:
    """The page with a hidden toctree for each section that has a list of pages."""
    opening, *sections = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    trees = [
        "\n".join(["```{toctree}", *[f":caption: {caption}"] * bool(caption), ":hidden:", "", *pages, "```"])
        for caption, section in zip(["", *sections[::2]], [opening, *sections[1::2]], strict=True)
        if (pages := re.findall(r"^- \[[^]]+\]\(([\w/]+)\.md\)", section, flags=re.MULTILINE))
    ]
    return "\n\n".join([text, *trees]) + "\n"


def adapt_to_the_site(_: object, page: str, source: list[str]) -> None:
    """Pages read well in the repository; on the site there are copies of the notebooks, and a navigation."""
    source[0] = source[0].replace("](../notebooks/", "](notebooks/")
    if page in LISTS:
        source[0] = with_navigation(source[0])


def is_left_out(_: object, what: str, name: str, *_rest: object) -> bool | None:
    """Leave out ``__new__``, which says no more than ``__init__`` beside it; None keeps autodoc's own decision."""
    return True if what == "class" and name == "__new__" else None


def setup(app: object) -> None:
    app.connect("source-read", adapt_to_the_site)  # type: ignore[attr-defined]
    app.connect("autodoc-skip-member", is_left_out)  # type: ignore[attr-defined]
