"""The gallery of topologies on the site: every family drawn when the site is built, by the package's own code.

On the page ``topologies`` it stands at ``PLACE``, a comment, and each family of the table links to its picture.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

import topologies
from topologies.drawing import draw_compact
from topologies.reports.family_samples import samples
from topologies.schedule import options_text

PAGE = "topologies"
PLACE = "<!-- the gallery: drawn when the site is built -->"
PICTURES = "_images/families"
WORLD_SIZE = 16  # that of the table


def with_gallery(text: str) -> str:
    """The page with a card for each family at ``PLACE``, and the families of its table as links to these."""
    if text.count(PLACE) != 1:
        raise ValueError(f"the page {PAGE!r} must have one line {PLACE!r}, where the gallery belongs")
    linked = re.sub(r"^\| `(\w+)`", r'| <a href="#family-\1"><code>\1</code></a>', text, flags=re.MULTILINE)
    cards = "\n".join(_card(name) for name in topologies.available())
    return linked.replace(PLACE, f'<div class="families">\n{cards}\n</div>')


def write_pictures(folder: Path) -> None:
    """Draw every family into a folder, which is made: ``NAME.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in topologies.available():
        (folder / f"{name}.svg").write_text(draw_compact(samples(name, WORLD_SIZE)[0]), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", _draw)
    app.connect("env-get-outdated", lambda *_: [PAGE])  # its cards are made of docstrings
    app.connect("source-read", _insert)
    return {"parallel_read_safe": True}


def _draw(app: Any) -> None:
    if app.builder.format == "html":
        write_pictures(Path(app.outdir) / PICTURES)


def _insert(_: Any, page: str, source: list[str]) -> None:
    if page == PAGE:
        source[0] = with_gallery(source[0])


def _card(name: str) -> str:
    drawn = samples(name, WORLD_SIZE)[0]
    facts = topologies.facts_of(name)
    shown = ", ".join(filter(None, (f"{drawn.world_size} ranks", options_text(drawn.options))))
    if drawn.world_size != WORLD_SIZE:
        shown += f" (the nearest number to {WORLD_SIZE} that it serves)"
    picture = f"{PICTURES}/{name}.svg"
    summary = re.sub(r"`{1,2}([^`]+)`{1,2}", r"<code>\1</code>", escape(facts.summary))
    return (
        f'<section class="family" id="family-{name}">\n'
        f'<a href="{picture}"><img src="{picture}" loading="lazy" alt="{escape(f"{name}, {shown}")}"/></a>\n'
        f'<div><p class="family-name"><code>{name}</code></p>\n<p>{summary}</p>\n'
        f'<p class="family-note">{escape(shown)}</p></div>\n</section>'
    )
