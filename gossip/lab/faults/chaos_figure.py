"""Figure of a run under faults: which ranks trained when, how long steps took, and the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gossip.lab.experiments.run_figures import BLUE, GREY, ORANGE, drawn
from gossip.lab.faults.chaos_report import ChaosResult

_MAX_POINTS = 200


def draw(result: ChaosResult, path: Path, group_size: int = 1) -> None:
    """Draw a run from its notes, over the seconds since the first; so many ranks make up a shard group."""
    began_at = min(note["at"] for note in result.notes)
    lives: defaultdict[int, list[float]] = defaultdict(list)
    for note in result.notes:
        if "trained" in note:
            lives[note["member"]].append(note["at"] - began_at)
    with drawn(path, 7.2, 5.6) as figure:
        ranks, times, losses = figure.subplots(3, 1, sharex=True, height_ratios=[1.4, 1, 1])
        ranks.set_title("Ranks that train, and faults")
        ylabel = "rank" if group_size == 1 else "shard group"
        ranks.set(ylabel=ylabel, yticks=sorted({member // group_size for member in lives}))
        ranks.invert_yaxis()

        def height(member: int) -> float:
            group, place = divmod(member, group_size)
            return group + 0.5 * (place - (group_size - 1) / 2) / group_size

        for member, life in lives.items():
            ranks.plot([min(life), max(life)], [height(member)] * 2, color=BLUE, linewidth=4 / group_size**0.5)
        for note in result.notes:
            if "fault" in note:
                place = note["at"] - began_at, height(note["member"])
                ranks.plot(*place, "X", color=ORANGE, markersize=7, markeredgecolor="white")
                kind = note["fault"]["kind"]
                ranks.annotate(kind, place, (6, 0), textcoords="offset points", va="center", fontsize=8)
        ended_at, took_s, loss = by_step(result.notes)
        ended_at -= began_at
        times.plot(ended_at, 1000 * took_s, color=BLUE, linewidth=0.8)
        times.set_title("Longest step of any rank")
        times.set_ylabel("ms")
        times.set_ylim(bottom=0)
        window = max(1, len(loss) // _MAX_POINTS)
        num_shown = len(loss) // window * window
        losses.plot(*(values[:num_shown].reshape(-1, window).mean(1) for values in (ended_at, loss)), color=BLUE)
        losses.set_title("Training loss, mean of the ranks")
        means = f"means over {window} steps" if window > 1 else ""
        losses.set_title(means, loc="right", fontsize=8.5, fontweight="normal", color=GREY)
        losses.set(yscale="log", xlabel="Seconds")


def by_step(notes: Sequence[Mapping[str, Any]]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return, [3, steps], when the first rank had made a step, the longest time that it took, and the mean loss.

    A rank that was frozen notes its last step when the others are many steps ahead.
    """
    told: defaultdict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for note in notes:
        if "trained" in note:
            made = note["trained"]
            told[made["step"]].append((note["at"], made["took_s"], made["loss"]))
    of_ranks = [np.array(told[step]).T for step in sorted(told)]
    return np.array([(at.min(), took_s.max(), loss.mean()) for at, took_s, loss in of_ranks]).T
