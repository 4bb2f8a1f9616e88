"""Examination of what ranks noted under faults, for torn messages, hangs, losses and returns of ranks; and a figure.

A note has the member number of its rank, the seconds since 1970 "at" which it was written, and one of: "begins";
"members" (from a step on); "trained" (a step's number, its members, the sum of what the rank trains before it, the
change of that sum by the update, its duration and the loss); "sent" and "mixed" (sender, receiver, the message's key
and a digest); "fault"; "comes back"; "ends". Members are ranks, also where shard groups of them hold a replica.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field

from gossip.lab.benchmarks.benchmark import Records, Spread, table
from gossip.lab.experiments.run_figures import BLUE, GREY, ORANGE, drawn

Notes = Sequence[Mapping[str, Any]]
_MAX_POINTS = 200
_STEPS_LATE = 3  # a message that does not come is missed in the next step, and who waits for it in the one after


class Aftermath(BaseModel):
    """What followed the faults of one kind, of which there were ``count``, in seconds.

    ``step_s`` is the longest step of a rank of another shard group, of those from the fault on that can be late because
    of it; ``without_s`` until the first step without the rank and its group, if no other fault of the group came before
    that; ``back_s`` until the process, or the one that was started in its place, had then made a step as another rank.
    """

    count: int
    step_s: Spread | None = None
    without_s: Spread | None = None
    back_s: Spread | None = None


class ChaosResult(BaseModel):
    """What became of a run, its ranks and its messages; times are from lowest to highest.

    ``share_of_steps`` is how many steps were made of those that the ranks at the beginning would have made together.
    """

    num_ended: int
    accuracies: list[float]
    members_at_the_end: list[int]
    steps: int
    share_of_steps: float
    faults: dict[str, Aftermath]
    num_joined: int
    num_came_back: int
    step_s: Spread | None
    num_messages_mixed: int
    num_messages_torn: int
    drift_of_the_mean: float
    num_steps_compared: int
    notes: list[dict[str, Any]] = Field(exclude=True, repr=False)


def examine(records: Records, group_size: int = 1) -> ChaosResult:
    """Return the findings from the notes of all ranks, of which so many make up a shard group."""
    notes = [dict(note) for by_rank in records for note in by_rank]
    ended = [note["ends"] for note in notes if "ends" in note]
    changes = sorted(
        (note["members"]["step"], note["at"], note["members"]["members"]) for note in notes if "members" in note
    )
    num_at_beginning = min((max(members) + 1 for step, _, members in changes if step == 0), default=0)
    step_s = [note["trained"]["took_s"] for note in notes if "trained" in note]
    sent = {tuple(note["sent"]) for note in notes if "sent" in note}
    mixed = [tuple(note["mixed"]) for note in notes if "mixed" in note]
    drift, num_compared = _drift(notes)
    return ChaosResult(
        num_ended=len(ended),
        accuracies=sorted({round(one["accuracy"], 4) for one in ended}),
        members_at_the_end=ended[0]["members"] if ended else [],
        steps=(steps := ended[0]["steps"] if ended else 0),
        share_of_steps=len(step_s) / max(1, steps * num_at_beginning),
        faults=after_faults(records, group_size),
        num_joined=len({member for *_, members in changes for member in members if member >= num_at_beginning}),
        num_came_back=sum("comes back" in note for note in notes),
        step_s=Spread.over(step_s) if step_s else None,
        num_messages_mixed=len(mixed),
        num_messages_torn=sum(message not in sent for message in mixed),
        drift_of_the_mean=drift,
        num_steps_compared=num_compared,
        notes=notes,
    )


def _drift(notes: Notes) -> tuple[float, int]:
    """Return the largest change of the sum over ranks beyond their updates, and the number of steps compared.

    A step is compared if all ranks that train in it, in the two steps before and in the step after have written notes,
    and these are the same ranks.
    """
    by_step: defaultdict[int, dict[int, Any]] = defaultdict(dict)
    for note in notes:
        if "trained" in note:
            by_step[note["trained"]["step"]][note["member"]] = note["trained"]
    differences = []
    for step, told in list(by_step.items()):
        window = [by_step.get(step + offset, {}) for offset in (-2, -1, 0, 1)]
        generations = {tuple(one["members"]) for of_step in window for one in of_step.values()}
        if len(generations) == 1 and all(set(of_step) == set(*generations) for of_step in window):
            before, after = (sum(one["sum"] for one in of_step.values()) for of_step in (told, window[3]))
            differences.append(abs(after - before - sum(one["update"] for one in told.values())))
    return max(differences, default=0.0), len(differences)


def in_words(result: ChaosResult) -> str:
    """Return the findings as a list and a table in Markdown."""
    found = [
        f"- {result.steps} steps; at the end {len(result.members_at_the_end)} ranks trained, with accuracies "
        f"{result.accuracies} of the averaged model. {result.share_of_steps:.1%} of the steps were made that the ranks "
        "at the beginning would have made.",
        f"- {result.num_joined} ranks joined, {result.num_came_back} of them in the process in which they had been "
        "frozen or cut off.",
        f"- A step: {in_ms(result.step_s)} ms.",
        f"- {result.num_messages_mixed} messages were mixed; {result.num_messages_torn} were not what was sent.",
        f"- Where nobody came or went the mean of the replicas moved by nothing but updates: over "
        f"{result.num_steps_compared} steps their sum is off by at most {result.drift_of_the_mean:.2g}.",
    ]
    return "\n".join([*found, "", shown(result.faults)])


class _Made(NamedTuple):
    """A step that a rank made, when it had ended, and how long it took."""

    step: int
    at: float
    took_s: float


def after_faults(records: Records, group_size: int) -> dict[str, Aftermath]:
    """Return what followed, by the name of the fault, from the notes of each process."""
    lives: list[dict[int, list[_Made]]] = [defaultdict(list) for _ in records]  # of each process, by member number
    faults: list[tuple[float, int, Mapping[str, Any]]] = []
    changes: list[tuple[float, list[int]]] = []
    for number, notes in enumerate(records):
        for note in notes:
            if made := note.get("trained"):
                lives[number][note["member"]].append(_Made(made["step"], note["at"], made["took_s"]))
            elif "members" in note:
                changes.append((note["at"], note["members"]["members"]))
            elif "fault" in note:
                faults.append((note["at"], number, note))
    steps_of = {member: life for of_process in lives for member, life in of_process.items()}
    changes.sort()
    count = Counter(_name(note["fault"]) for *_, note in faults)
    times: dict[str, defaultdict[str, list[float]]] = {name: defaultdict(list) for name in count}
    for at, number, note in faults:
        fault, member = note["fault"], note["member"]
        found, group = times[_name(fault)], member // group_size
        others = [other for other in fault["members"] if other // group_size != group]
        late = [made for other in others for made in _late_steps(steps_of.get(other, []), at, fault["in_step"])]
        if late:
            found["step_s"].append(max(made.took_s for made in late))
        gone_at = next((when for when, members in changes if when > at and member not in members), -math.inf)
        of_group = (when for when, _, later in faults if later["member"] // group_size == group)
        if gone_at > at and not any(at < when < gone_at for when in of_group):
            found["without_s"].append(gone_at - at)
            begun = (life[0].at for other, life in lives[number].items() if other != member)
            if (back_at := next((when for when in begun if when > at), None)) is not None:
                found["back_s"].append(back_at - at)
    return {
        name: Aftermath(count=count[name], **{kind: Spread.over(values) for kind, values in found.items()})
        for name, found in sorted(times.items())
    }


def _late_steps(life: Sequence[_Made], at: float, step: int) -> Sequence[_Made]:
    """Return the steps that ended after a time, up to some steps after ``step``."""
    first = bisect_right(life, at, key=lambda made: made.at)
    return life[first : bisect_right(life, step + _STEPS_LATE, key=lambda made: made.step)]


def _name(fault: Mapping[str, Any]) -> str:
    """Return the kind of a fault; for a temporary one also whether it is over 1 s, after which it may be given up."""
    if fault["duration_s"] is None:
        return str(fault["kind"])
    return f"{fault['kind']} ({'over' if fault['duration_s'] > 1 else 'up to'} 1 s)"


def shown(faults: Mapping[str, Aftermath]) -> str:
    """Return a table in Markdown, in milliseconds."""
    titles = ("fault", "number", "longest step of others, ms", "first step without, ms", "back, ms")
    rows = (
        [name, str(each.count), *(in_ms(spread) for spread in (each.step_s, each.without_s, each.back_s))]
        for name, each in faults.items()
    )
    return table(titles, rows) if faults else "There were no faults."


def in_ms(spread: Spread | None) -> str:
    """Return a time in milliseconds."""
    return "-" if spread is None else spread.shown(".1f", 1e3)


def draw(result: ChaosResult, path: Path, group_size: int = 1) -> None:
    """Draw who trained when, how long steps took, and the loss, over the seconds since the first note.

    So many ranks make up a shard group.
    """
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
