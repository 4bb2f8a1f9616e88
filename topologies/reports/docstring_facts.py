"""What a family's docstring says about it, as data: for tables, the gallery and tests."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from topologies.family_registry import family

#: The lines of a docstring's section Properties, each a field of :class:`Facts`.
PROPERTIES = ("sizes", "degree", "period", "exact", "rate", "weights")

_MOST_SUMMARY_CHARACTERS = 130


@dataclass(frozen=True)
class Facts:
    """The statements of a family's docstring, as plain text.

    Attributes
    ----------
    name
        The registered name.
    summary
        What a round is, in one sentence.
    definition
        Paragraphs: the rounds in words and formulas.
    sizes
        World sizes served.
    degree
        Messages that a rank sends and receives in a round.
    period
        Rounds before the schedule repeats.
    exact
        When all ranks hold exactly the mean.
    rate
        How fast they come closer to it.
    weights
        Weights, and whether they are symmetric and doubly stochastic.
    sources
        Where the family comes from.
    example
        A Python session.
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

    Parameters
    ----------
    name
        One of :func:`topologies.available`.

    Raises
    ------
    ValueError
        If there is no such family, or its docstring lacks something; the error names what.

    Examples
    --------
    >>> facts_of("hypercube").sizes
    'n = 2^d'
    """
    docstring = inspect.getdoc(family(name)) or ""
    opening, sections = _split(docstring)
    summary, *definition = _paragraphs(opening) or [""]
    if not summary.endswith(".") or len(summary) >= _MOST_SUMMARY_CHARACTERS:
        raise _incomplete(
            name, "summary", f"a first paragraph of under {_MOST_SUMMARY_CHARACTERS} characters and a full stop"
        )
    if not definition:
        raise _incomplete(name, "definition", "a paragraph after the summary")
    sources = tuple(_sources(sections.get("References", "")))
    if not sources:
        raise _incomplete(name, "References", "a section with an author, a title and a year")
    example = sections.get("Examples", "")
    if ">>> " not in example:
        raise _incomplete(name, "Examples", "a section with a session that runs")
    return Facts(
        name=name,
        summary=summary,
        definition=tuple(definition),
        **_properties(name, sections.get("Properties", "")),
        sources=sources,
        example=example,
    )


def _split(docstring: str) -> tuple[str, dict[str, str]]:
    """Return what comes before the first underlined heading, and the text below each of them."""
    opening, *rest = re.split(r"^(\w[\w ]*)\n-{3,}$", docstring, flags=re.MULTILINE)
    return opening, {heading: text.strip("\n") for heading, text in zip(rest[::2], rest[1::2], strict=True)}


def _paragraphs(text: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def _properties(name: str, section: str) -> dict[str, str]:
    lines = [line for line in section.splitlines() if line.strip()]
    found = {key.strip(): text.strip() for key, _, text in (line.partition(" : ") for line in lines)}
    for key in PROPERTIES:
        if not found.get(key):
            raise _incomplete(name, key, f'a line "{key} : .." in the section Properties')
    for key in found:
        if key not in PROPERTIES:
            raise ValueError(
                f"the docstring of family {name!r} has the property {key!r}; known are {', '.join(PROPERTIES)}, one "
                f"line each"
            )
    return found


def _sources(section: str) -> list[str]:
    """Return the references: each ends with a full stop at the end of a line."""
    return [" ".join(source.split()) for source in re.split(r"(?<=\.)\n(?=\S)|\n\s*\n", section) if source.strip()]


def _incomplete(name: str, key: str, needed: str) -> ValueError:
    return ValueError(f"the docstring of family {name!r} has no {key}; give it {needed}")
