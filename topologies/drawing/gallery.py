"""A page of all families in one HTML file: a card with picture, definition, key figures and source for each.

Nothing is loaded from elsewhere, and nothing runs. The page is well-formed XML, too.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from topologies.drawing.picture_files import output_path
from topologies.drawing.topology_pictures import MAX_RANKS_WITH_LINES, draw_compact
from topologies.family_registry import available
from topologies.reports.docstring_facts import PROPERTIES, Facts, facts_of
from topologies.reports.family_samples import sample_text, samples
from topologies.schedule import options_text
from topologies.validation import check_integer

if TYPE_CHECKING:
    from topologies.topology import Topology

_STYLE = """
:root { color-scheme: light dark; --page: #f4f6f8; --card: #ffffff; --ink: #1f2933; --faint: #52606d; --line: #d5dbe1;
  --link: #1f5f9e; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181d; --card: #1e242b; --ink: #e6eaee; --faint: #a9b4bf; --line: #38424d; --link: #86b8ec; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 1rem/1.5 system-ui, "DejaVu Sans", Verdana, sans-serif; }
header, main { max-width: 84rem; margin: 0 auto; padding: 1rem; }
header p { max-width: 46rem; }
h1 { margin: 0.5rem 0; font-size: 1.6rem; line-height: 1.2; }
h2 { margin: 1rem 0 0.25rem; font-size: 1.15rem; }
p { margin: 0.4rem 0; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; margin: 0.5rem 0; padding: 0; list-style: none; }
main { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.card { min-width: 0; padding: 1rem; background: var(--card); border: 1px solid var(--line); border-radius: 0.6rem; }
.card figure { margin: 0; padding: 0.4rem; background: #ffffff; border-radius: 0.4rem; }
.card img { display: block; width: 100%; height: auto; }
.summary { font-weight: 600; }
.note, .sources { color: var(--faint); font-size: 0.9rem; }
.sources { margin: 0.4rem 0 0; padding-left: 1.1rem; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 0.9em; }
dl { display: grid; grid-template-columns: minmax(0, 6.5rem) minmax(0, 1fr); gap: 0.15rem 0.8rem; margin: 0.7rem 0;
  font-size: 0.92rem; }
dt { color: var(--faint); }
dd { margin: 0; }
"""


def gallery_page(world_size: int = 16) -> str:
    """Return the page, each family drawn for ``world_size`` ranks, 2 to 80, or the nearest number that it serves."""
    world_size = check_integer("world_size", world_size, minimum=2, maximum=MAX_RANKS_WITH_LINES)
    names = available()
    links = "\n".join(f'<li><a href="#{escape(name)}">{escape(name)}</a></li>' for name in names)
    cards = "\n".join(_card(facts_of(name), samples(name, world_size), world_size) for name in names)
    return f"""<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>Topologies for {world_size} ranks</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>Topologies for {world_size} ranks</h1>
<p>In a round every rank i replaces its value by the weighted mean Σ<sub>j</sub> W[i, j] x<sub>j</sub> of what it reads
and its own. A picture shows the first rounds, a matrix W or the product of a period, and how much of a disagreement
is left at most after some rounds. Every group has a colour, a rank that is alone is grey; the thicker a line, the
larger its weight, a dashed one is negative; an arrow points to the rank that reads. J is the matrix of all 1/n, tau is
ceil(log2 n), beta is the largest singular value of (product &#8722; J), SLEM the second largest modulus of the
eigenvalues of W.</p>
<nav aria-label="Families"><ul>
{links}
</ul></nav>
</header>
<main>
{cards}
</main>
</body>
</html>
"""


def write_gallery(path: str | os.PathLike[str], world_size: int = 16) -> None:
    """Write :func:`gallery_page` into a file that ends in .html, in a folder that exists."""
    path = output_path(path, (".html", ".htm"))
    path.write_text(gallery_page(world_size), encoding="utf-8")


def _card(facts: Facts, variants: Sequence[Topology], world_size: int) -> str:
    drawn = variants[0]
    shown = sample_text(drawn, world_size)
    stated = [("World sizes", facts.sizes), *((key.capitalize(), getattr(facts, key)) for key in PROPERTIES[1:])]
    rows = [*stated, *(("Measured", _measured(variant)) for variant in variants)]
    facts_list = "\n".join(f"<dt>{_marked_up(term)}</dt><dd>{_marked_up(text)}</dd>" for term, text in rows)
    definition = "\n".join(f"<p>{_marked_up(paragraph)}</p>" for paragraph in facts.definition)
    sources = "\n".join(f"<li>{_marked_up(source)}</li>" for source in facts.sources)
    name, label = escape(facts.name), escape(f"{facts.name}, {shown}: {facts.summary}")
    picture = base64.b64encode(draw_compact(drawn).encode()).decode()
    return f"""<article class="card" id="{name}" aria-labelledby="{name}-title">
<figure><img src="data:image/svg+xml;base64,{picture}" alt="{label}"/></figure>
<h2 id="{name}-title">{name}</h2>
<p class="note">Drawn: {_marked_up(shown)}.</p>
<p class="summary">{_marked_up(facts.summary)}</p>
{definition}
<dl>
{facts_list}
</dl>
<ul class="sources">
{sources}
</ul>
</article>"""


def _measured(topology: Topology) -> str:
    found = topology.describe()
    size = ", ".join(filter(None, (f"n={found.world_size}", options_text(topology.options))))
    parts = [f"{size}: at most {found.max_sends} sent", f"period {found.period}" if found.period else "no period"]
    if found.period is not None:
        parts.append(f"exact after {found.exact_after}" if found.exact_after else "not exact")
    if found.slem is not None and not found.exact_after:
        parts.append(f"SLEM {found.slem:.3g}")
    if found.num_rounds > 1:
        parts.append(f"beta {found.beta:.3g} after {found.num_rounds} rounds")
    return ", ".join(parts)


def _marked_up(text: str) -> str:
    """Return escaped text with the docstrings' literals, ``x``, `x` and :func:`x`, as code."""
    return re.sub(r"(?::\w+:)?(`{1,2})([^`]+)\1", r"<code>\2</code>", escape(text))
