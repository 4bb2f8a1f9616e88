"""Figure of a run under faults: which ranks trained when, how long steps took, and the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossip.lab.experiments.run_figures import BLUE, GREY, ORANGE, STYLE, import_matplotlib, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = Mapping[int, Sequence[Any]]
"""Notes by the member number of the rank that wrote them."""

_MAX_POINTS = 200


def draw(events: Lines, steps: Lines, path: Path) -> None:
    """Draw a run from its notes.

    Parameters
    ----------
    events : mapping of int to sequence of (float, str, mapping)
        For each event the seconds since 1970, its name, and details.
    steps : mapping of int to sequence
        For each step its number, the members, the sum of all parameters, the change of that sum by the update, the
        duration, the time at its end, and the loss on the batch.
    path : Path
        The path of the file to write.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is not installed.
    """
    matplotlib = import_matplotlib()
    from matplotlib.figure import Figure

    began_at = min(at for lines in events.values() for at, *_ in lines)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 5.6), layout="constrained", facecolor="white")
        ranks, times, losses = figure.subplots(3, 1, sharex=True, height_ratios=[1.4, 1, 1])
        _draw_ranks(ranks, events, steps, began_at)
        _draw_steps(times, losses, steps, began_at)
        losses.set_xlabel("Seconds")
        save(figure, path)


def _draw_ranks(axes: Axes, events: Lines, steps: Lines, began_at: float) -> None:
    axes.set_title("Ranks that train, and faults")
    axes.set_ylabel("rank")
    axes.set_yticks(sorted(steps))
    axes.invert_yaxis()
    for member, lines in steps.items():
        ended_at = [at - began_at for *_, at, _ in lines]
        if ended_at:
            axes.plot([ended_at[0], ended_at[-1]], [member, member], color=BLUE, linewidth=4)
    for member, lines in events.items():
        for place in ((at - began_at, member, content["kind"]) for at, what, content in lines if what == "fault"):
            at, _, kind = place
            axes.plot(at, member, "X", color=ORANGE, markersize=7, markeredgecolor="white")
            axes.annotate(kind, (at, member), (6, 0), textcoords="offset points", va="center", fontsize=8)


def _draw_steps(times: Axes, losses: Axes, steps: Lines, began_at: float) -> None:
    told: defaultdict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for lines in steps.values():
        for step, _, _, _, took_s, ended_at, loss in lines:
            told[step].append((ended_at - began_at, took_s, loss))
    ended_at, took_s = (np.array([max(one[place] for one in told[step]) for step in sorted(told)]) for place in (0, 1))
    loss = np.array([np.mean([one[2] for one in told[step]]) for step in sorted(told)])
    times.plot(ended_at, 1000 * took_s, color=BLUE, linewidth=0.8)
    times.set_title("Longest step of any rank")
    times.set_ylabel("ms")
    times.set_ylim(bottom=0)
    window = max(1, len(loss) // _MAX_POINTS)
    num_shown = len(loss) // window * window
    losses.plot(*(values[:num_shown].reshape(-1, window).mean(1) for values in (ended_at, loss)), color=BLUE)
    losses.set_title("Training loss, mean of the ranks")
    losses.set_title(
        f"means over {window} steps" * (window > 1), loc="right", fontsize=8.5, fontweight="normal", color=GREY
    )
    losses.set_yscale("log")
