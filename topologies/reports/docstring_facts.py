"""What a family's docstring says about it, as data: for tables, the site and tests."""

import inspect
import re
from dataclasses import dataclass

from topologies.topology import family

#: The lines of a docstring's section Properties, each a field of :class:`Facts`.
PROPERTIES = ("sizes", "degree", "period", "exact", "rate", "weights")

_MOST_SUMMARY_CHARACTERS = 130


@dataclass(frozen=True)
class Facts:
    """The statements of a family's docstring, as plain text.

    Attributes
    ----------
    name, summary
        The registered name, and what a round is, in one sentence.
    definition
        Paragraphs: the rounds in words and formulas.
    sizes, degree, period
        World sizes served; messages that a rank sends and receives in a round; rounds before the schedule repeats.
    exact, rate
        When all ranks hold exactly the mean, and how fast they come closer to it.
    weights
        Weights, and whether they are symmetric and doubly stochastic.
    sources, example
        Where the family comes from, and a Python session.
    """

    name: str
    summary: str
    definition: tuple[str, ...]
    sizes: str
    degree: str
    period: str
    exact: str
    rate: str
    weights: str
    sources: tuple[str, ...]
    example: str


def facts_of(name: str) -> Facts:
    """Return what the docstring of a registered family states.

    Raises
    ------
    ValueError
        If there is no such family, or its docstring lacks something; the error names what.

    Examples
    --------
    >>> facts_of("hypercube").sizes
    'n = 2^d'
    """
    opening, *rest = re.split(r"^(\w[\w ]*)\n-{3,}$", inspect.getdoc(family(name)) or "", flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    summary, *definition = _paragraphs(r"\n\s*\n", opening) or [""]
    lines = sections.get("Properties", "").splitlines()
    properties = {
        key.strip(): text.strip() for key, _, text in (line.partition(" : ") for line in lines) if key.strip()
    }
    sources = _paragraphs(r"(?<=\.)\n(?=\S)|\n\s*\n", sections.get("References", ""))
    example = sections.get("Examples", "").strip("\n")
    needed = {
        f"summary of under {_MOST_SUMMARY_CHARACTERS} characters with a full stop": summary.endswith(".")
        and len(summary) < _MOST_SUMMARY_CHARACTERS,
        "definition, a paragraph after the summary": definition,
        **{f'{key}, a line "{key} : .." in the section Properties': properties.get(key) for key in PROPERTIES},
        "section References with an author, a title and a year": sources,
        "section Examples with a session that runs": ">>> " in example,
    }
    if unknown := sorted(set(properties) - set(PROPERTIES)):
        raise ValueError(
            f"the docstring of family {name!r} has the property {unknown[0]!r}; known are {', '.join(PROPERTIES)}, one "
            f"line each"
        )
    if missing := [what for what, found in needed.items() if not found]:
        raise ValueError(f"the docstring of family {name!r} lacks its {'; its '.join(missing)}; add it")
    return Facts(name, summary, tuple(definition), **properties, sources=tuple(sources), example=example)


def _paragraphs(separator: str, text: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in re.split(separator, text) if paragraph.strip()]
