"""A table of all families in Markdown: what their docstrings state, and what is measured at one size."""

import math

from topologies.analysis.description import Description, count
from topologies.reports.docstring_facts import facts_of
from topologies.reports.family_samples import samples, title_of
from topologies.topology import available

_HEAD = (
    "| topology | world sizes | peers | rounds in a period | the mean exactly after "
    "| what a period leaves of a disagreement |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


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
