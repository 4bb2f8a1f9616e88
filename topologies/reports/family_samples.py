"""One or a few topologies of every family, to show what it does at about a given size.

Without those that are another one in disguise: the same rounds under another name, or with empty rounds in between.
And a table of all families in Markdown: what their docstrings state, also as data for the site and tests, and what is
measured at one size.
"""

import inspect
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from topologies.analysis.description import Description, count
from topologies.matrix_storage import FloatArray
from topologies.schedule import title
from topologies.topology import DEFAULT, Topology, available, family, options_of, variants
from topologies.validation import check_integer

#: Families are asked for sizes up to here.
LARGEST_SAMPLE = 1024
#: Exchanges that are compared, and rounds in which they are looked for where there is no period.
_COMPARED = 64
#: Fingerprints closer than this belong to the same round.
_SAME = 1e-9
#: The lines of a docstring's section Properties, each a field of :class:`Facts`.
PROPERTIES = ("sizes", "degree", "period", "exact", "rate", "weights")
_MOST_SUMMARY_CHARACTERS = 130
_HEAD = (
    "| topology | world sizes | peers | rounds in a period | the mean exactly after "
    "| what a period leaves of a disagreement |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


def samples(name: str, world_size: int) -> list[Topology]:
    """Return the variants of a family that differ, for n ranks (2 to 1024) or for the nearest number that it serves.

    Examples
    --------
    >>> samples("hypercube", 11)
    [Topology('hypercube', world_size=8, period=1)]
    >>> [topology.options["k"] for topology in samples("hyper_hypercube", 16)]  # 2 and 4 are no different
    [1, 3]
    """
    world_size = check_integer("world_size", world_size, minimum=2, maximum=LARGEST_SAMPLE)
    for size in sorted(range(2, LARGEST_SAMPLE + 1), key=lambda size: abs(size - world_size)):
        if found := without_disguises(variants(name, size)):
            return found
    raise ValueError(
        f"no variant of family {name!r} serves any world_size from 2 to {LARGEST_SAMPLE}; name options that do: "
        f"@register({name!r}, variants=lambda world_size, local_size: [{{'option': 'value'}}])"
    )


def title_of(topology: Topology) -> str:
    """Return the name, and in brackets the options that are not the family's defaults."""
    defaults = options_of(family(topology.name)) if topology.registered else {}
    chosen = {
        name: value
        for name, value in topology.options.items()
        if name not in defaults or value != defaults[name].default
    }
    return title(topology.name, chosen)


def without_disguises(topologies: Iterable[Topology]) -> list[Topology]:
    """Return the topologies without those whose exchanges are another's, in the order given.

    Exchanges are the rounds in which something is sent. Where several topologies have the same ones in the same
    order, that one stays whose rounds are empty least often; of these the one whose options are nearest to their
    defaults, the default family, and the one with the fewest options. What begins with a warm-up is like no other.

    Two rounds are the same if they map the same random vectors to the same values, which is found without comparing
    every weight; two that differ do so with probability 0. Without a period the exchanges of 64 rounds are compared.

    Examples
    --------
    >>> complete, ring = topologies.build("complete", 4), topologies.build("ring", 4)
    >>> one_node = topologies.build("local_global", 4, local_size=4)  # complete in every other round
    >>> without_disguises([one_node, ring, complete])
    [Topology('ring', world_size=4, period=1), Topology('complete', world_size=4, period=1)]
    """
    candidates = [(number, topology, *_exchanges(topology)) for number, topology in enumerate(topologies)]
    kept: dict[int, tuple[Topology, FloatArray]] = {}
    for number, topology, prints, _ in sorted(candidates, key=lambda each: (each[3], _plainness(each[1]))):
        if not any(_same(prints, others) for _, others in kept.values()):
            kept[number] = topology, prints
    return [topology for _, (topology, _) in sorted(kept.items())]


def _exchanges(topology: Topology) -> tuple[FloatArray, float]:
    """Return fingerprints of the exchanges, shape ``[exchanges, 2]``, and how many rounds there are for each."""
    readers, senders = np.random.default_rng(0).normal(size=(2, topology.world_size, 2))
    num_rounds = topology.period or _COMPARED
    rounds = [topology.round(topology.warmup + t) for t in range(num_rounds)]
    found = [(readers * round_.mix(senders)).sum(axis=0) for round_ in rounds if not round_.is_identity]
    prints = np.array(found).reshape(-1, 2)
    if topology.period is not None and found:
        prints = np.resize(prints, (max(_COMPARED, len(found)), 2))
    return prints + (np.nan if topology.warmup else 0.0), num_rounds / max(len(found), 1)


def _same(one: FloatArray, other: FloatArray) -> bool:
    shown = min(len(one), len(other))
    return (shown > 0 or len(one) == len(other)) and bool((np.abs(one[:shown] - other[:shown]) <= _SAME).all())


def _plainness(topology: Topology) -> tuple[int, bool, int, str]:
    """Return what the plainest topology has the least of: options unlike their defaults, distance from the default."""
    options = options_of(family(topology.name)) if topology.registered else {}
    unlike_default = sum(
        name in options and options[name].default not in (options[name].empty, value)
        for name, value in topology.options.items()
    )
    return unlike_default, topology.name != DEFAULT, len(options), topology.name


def markdown_table(world_size: int = 16) -> str:
    """Return one row for each family and variant that differs, measured at ``world_size`` or the nearest size served.

    That is 2 to 1024; the time grows with its third power.
    """
    lines = [_HEAD]
    for name in available():
        sizes = facts_of(name).sizes
        for topology in samples(name, world_size):
            measured = topology.describe()
            nearest = f", {measured.world_size} ranks" if measured.world_size != world_size else ""
            period = "none" if measured.period is None else str(measured.period)
            exact = count(measured.exact_after, "round") if measured.exact_after else "-"
            what = f"`{name}`{title_of(topology).removeprefix(name)}{nearest}"
            cells = (what, sizes, str(measured.max_sends), period, exact, _left(measured))
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines)


def _left(measured: Description) -> str:
    text = "nothing" if measured.beta < 1e-12 else f"at most {_percent(measured.beta)}"
    return text if measured.period else f"{text}, after {count(measured.num_rounds, 'round')}"


def _percent(share: float) -> str:
    """Return a share rounded up: to one decimal, or to more where that would hide the distance to 100 %.

    Examples
    --------
    >>> _percent(0.6), _percent(0.9492), _percent(0.99921), _percent(1.0)
    ('60.0 %', '95.0 %', '99.93 %', '100.0 %')
    """
    for decimals in (1,) if share > 1 - 1e-6 else (1, 2, 3, 4):
        scale = 10**decimals
        rounded = math.ceil(share * 100 * scale - 1e-7) / scale
        if rounded < 100:
            break
    return f"{rounded:.{decimals}f} %"


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
