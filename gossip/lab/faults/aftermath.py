"""What followed faults: how long steps of the others took, and when a rank was left out and came back."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from gossip.lab.benchmarks.benchmark import Records
from gossip.lab.benchmarks.summaries import Spread, table

_STEPS_LATE = 3  # a message that does not come is missed in the next step, and who waits for it in the one after


class Aftermath(BaseModel):
    """What followed the faults of one kind, of which there were ``count``, in seconds.

    ``step_s`` is the longest step of a rank of another shard group, of those from the fault on that can be late because
    of it; ``without_s`` until the first step without the rank and its group, if no other fault of the group came before
    that; ``back_s`` until the process, or the one that was started in its place, had then made a step as another rank.
    """

    count: int
    step_s: Spread | None
    without_s: Spread | None
    back_s: Spread | None


class _Made(NamedTuple):
    """A step that a rank made, when it had ended, and how long it took."""

    step: int
    at: float
    took_s: float


def after_faults(records: Records, group_size: int) -> dict[str, Aftermath]:
    """Return what followed, by the name of the fault, from the notes that :mod:`.chaos_report` describes."""
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
    count: Counter[str] = Counter()
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for at, number, note in faults:
        fault, member = note["fault"], note["member"]
        name, group = _name(fault), member // group_size
        count[name] += 1
        others = [other for other in fault["members"] if other // group_size != group]
        late = [made for other in others for made in _late_steps(steps_of.get(other, []), at, fault["in_step"])]
        if late:
            times[name, "step_s"].append(max(made.took_s for made in late))
        gone_at = next((when for when, members in changes if when > at and member not in members), -math.inf)
        of_group = (when for when, _, later in faults if later["member"] // group_size == group)
        if gone_at > at and not any(at < when < gone_at for when in of_group):
            times[name, "without_s"].append(gone_at - at)
            begun = (life[0].at for other, life in lives[number].items() if other != member)
            times[name, "back_s"] += [when - at for when in begun if when > at][:1]
    return {
        name: Aftermath(
            count=count[name],
            **{
                kind: Spread.over(values) if (values := times[name, kind]) else None
                for kind in ("step_s", "without_s", "back_s")
            },
        )
        for name in sorted(count)
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
