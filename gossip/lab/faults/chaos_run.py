"""A run under random faults, and an examination of its notes for torn messages, hangs, losses and returns of ranks."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gossip
from gossip.lab.faults.chaos_figure import draw
from gossip.lab.faults.chaos_worker import Chaos, train

_PRELOAD = ("gossip.lab.faults.chaos_worker", "sklearn.datasets", "sklearn.model_selection")


def run(chaos: Chaos, folder: Path) -> dict[str, Any]:
    """Train under faults, and examine the notes.

    Parameters
    ----------
    chaos : Chaos
    folder : Path
        A new folder for the notes, ``report.json``, ``report.md`` and ``course.svg``.

    Returns
    -------
    dict
        The content of ``report.json``.

    Raises
    ------
    LaunchError
        All ranks have failed.
    """
    folder.mkdir(parents=True)
    began_at = time.time()
    results = gossip.launch(
        train,
        str(folder),
        chaos,
        began_at,
        world_size=chaos.ranks,
        preload=_PRELOAD,
        on_peer_loss="continue",
        restart=chaos.restarts,
    )
    ended = [result for result in results if result is not None]
    report = {"chaos": asdict(chaos), "took_s": time.time() - began_at, **examine(folder, ended)}
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(in_words(report), encoding="utf-8")
    draw(_by_member(folder, "events"), _by_member(folder, "steps"), folder / "course.svg")
    return report


def examine(folder: Path, ended: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the findings from the notes of all ranks; ``ended`` holds the results of ranks that trained to the end."""
    events = _by_member(folder, "events")
    steps = _by_member(folder, "steps")
    faults = [
        (at, member, content) for member, lines in events.items() for at, kind, content in lines if kind == "fault"
    ]
    changes = sorted(
        (content["step"], at, tuple(content["members"]))
        for lines in events.values()
        for at, kind, content in lines
        if kind == "members"
    )
    gone_after_s = [found for fault in faults if (found := _gone_after(fault, changes)) is not None]
    torn = _torn(folder)
    drift, num_steps_with_drift = _drift(steps)
    times = [took_s for lines in steps.values() for _, _, _, _, took_s, *_ in lines]
    members = {member for _, _, generation in changes for member in generation}
    return {
        "num_ended": len(ended),
        "accuracies": sorted({round(one["accuracy"], 4) for one in ended}),
        "members_at_the_end": ended[0]["members"] if ended else [],
        "steps": ended[0]["steps"] if ended else 0,
        "faults": dict(Counter(_name(content) for _, _, content in faults)),
        "num_joined": len([member for member in members if member >= _num_at_beginning(changes)]),
        "num_came_back": sum(kind == "comes back" for lines in events.values() for _, kind, _ in lines),
        "gone_after_s": _spread(gone_after_s),
        "step_s": _spread(times),
        "num_messages_mixed": torn[0],
        "num_messages_torn": torn[1],
        "drift_of_the_mean": drift,
        "num_steps_compared": num_steps_with_drift,
    }


def in_words(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    chaos = report["chaos"]
    lines = [
        "# A run under faults",
        "",
        f"{chaos['ranks']} ranks, {chaos['topology']}, compression {chaos['compression']}, seed {chaos['seed']}, "
        f"{report['took_s']:.0f} s; `min_ranks={chaos['min_ranks']}`.",
        "",
        f"- {report['steps']} steps; at the end {len(report['members_at_the_end'])} ranks trained, with accuracies "
        f"{report['accuracies']} of the averaged model.",
        f"- Faults: {', '.join(f'{count} {kind}' for kind, count in sorted(report['faults'].items())) or 'none'}. "
        f"{report['num_joined']} ranks joined, {report['num_came_back']} of them in the process in which they had been "
        "frozen or cut off.",
        f"- From a kill to the first step without that rank: {_spread_in_words(report['gone_after_s'])}.",
        f"- A step: {_spread_in_words(report['step_s'])}.",
        f"- {report['num_messages_mixed']} messages were mixed; {report['num_messages_torn']} were not what was sent.",
        f"- Where nobody came or went the mean of the replicas moved by nothing but updates: over "
        f"{report['num_steps_compared']} steps their sum is off by at most {report['drift_of_the_mean']:.2g}.",
    ]
    return "\n".join(lines) + "\n"


def _by_member(folder: Path, name: str) -> dict[int, list[Any]]:
    files = {int(path.stem.removeprefix(name)): path for path in folder.glob(f"{name}*.jsonl")}
    return {member: _lines(path) for member, path in sorted(files.items())}


def _lines(path: Path) -> list[Any]:
    """Read all complete lines; the last line may be incomplete because its rank was killed."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def _name(fault: dict[str, Any]) -> str:
    """Return the kind of a fault; for a temporary one also whether it is over 1 s, after which it may be given up."""
    if fault["duration_s"] is None:
        return str(fault["kind"])
    return f"{fault['kind']} (over 1 s)" if fault["duration_s"] > 1 else f"{fault['kind']} (up to 1 s)"


def _num_at_beginning(changes: list[tuple[int, float, tuple[int, ...]]]) -> int:
    return min(max(members) + 1 for step, _, members in changes if step == 0)


def _gone_after(
    fault: tuple[float, int, dict[str, Any]], changes: list[tuple[int, float, tuple[int, ...]]]
) -> float | None:
    """Return the seconds from a kill until the others trained without that rank."""
    at, member, content = fault
    later = [changed_at - at for _, changed_at, members in changes if changed_at > at and member not in members]
    return min(later) if content["kind"] == "kill" and later else None


def _torn(folder: Path) -> tuple[int, int]:
    """Return the number of mixed messages, and the number of those that do not equal a sent message."""
    sent = {
        (member, step, bucket, turn, to, digest)
        for member, lines in _by_member(folder, "sent").items()
        for step, bucket, turn, to, digest in lines
    }
    mixed = [
        (sender, step, bucket, turn, member, digest)
        for member, lines in _by_member(folder, "mixed").items()
        for step, bucket, turn, sender, digest in lines
    ]
    return len(mixed), sum(message not in sent for message in mixed)


def _drift(steps: dict[int, list[Any]]) -> tuple[float, int]:
    """Return the largest change of the sum over ranks beyond their updates, and the number of steps compared.

    A step is compared if all ranks that train in it, in the two steps before and in the step after have written notes,
    and these are the same ranks.
    """
    by_step: dict[int, dict[int, tuple[tuple[int, ...], float, float]]] = defaultdict(dict)
    for member, lines in steps.items():
        for step, members, total, change, *_ in lines:
            by_step[step][member] = tuple(members), total, change
    largest, num_compared = 0.0, 0
    for step, told in by_step.items():
        window = [by_step.get(step + offset, {}) for offset in (-2, -1, 0, 1)]
        generations = {members for of_step in window for members, _, _ in of_step.values()}
        if len(generations) != 1 or any(set(of_step) != set(next(iter(generations))) for of_step in window):
            continue
        before = sum(total for _, total, _ in told.values())
        after = sum(total for _, total, _ in window[3].values())
        update = sum(change for _, _, change in told.values())
        largest, num_compared = max(largest, abs(after - before - update)), num_compared + 1
    return largest, num_compared


def _spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "largest": max(values), "number": len(values)}


def _spread_in_words(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "none"
    return (
        f"{1000 * spread['median']:.1f} ms (median), {1000 * spread['largest']:.0f} ms at most, of {spread['number']}"
    )
