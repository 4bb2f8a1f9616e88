"""Figure of a run under faults: which ranks trained when, how long steps took, and the loss."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from gossip.lab.benchmarks.summaries import drawn
from gossip.lab.experiments.run_figures import BLUE, GREY, ORANGE
from gossip.lab.faults.chaos_report import ChaosResult

_MAX_POINTS = 200


def draw(result: ChaosResult, path: Path) -> None:
    """Draw a run from its notes, over the seconds since the first."""
    began_at = min(note["at"] for note in result.notes)
    lives: defaultdict[int, list[float]] = defaultdict(list)
    told: defaultdict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for note in result.notes:
        if "trained" in note:
            at, made = note["at"] - began_at, note["trained"]
            lives[note["member"]].append(at)
            told[made["step"]].append((at, made["took_s"], made["loss"]))
    with drawn(path, 7.2, 5.6) as figure:
        ranks, times, losses = figure.subplots(3, 1, sharex=True, height_ratios=[1.4, 1, 1])
        ranks.set_title("Ranks that train, and faults")
        ranks.set(ylabel="rank", yticks=sorted(lives))
        ranks.invert_yaxis()
        for member, life in lives.items():
            ranks.plot([min(life), max(life)], [member, member], color=BLUE, linewidth=4)
        for note in result.notes:
            if "fault" in note:
                place = note["at"] - began_at, note["member"]
                ranks.plot(*place, "X", color=ORANGE, markersize=7, markeredgecolor="white")
                kind = note["fault"]["kind"]
                ranks.annotate(kind, place, (6, 0), textcoords="offset points", va="center", fontsize=8)
        of_ranks = [np.array(told[step]) for step in sorted(told)]
        ended_at, took_s = np.array([made[:, :2].max(0) for made in of_ranks]).T
        loss = np.array([made[:, 2].mean() for made in of_ranks])
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
