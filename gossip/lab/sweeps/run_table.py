"""The table over the runs of a multirun (``-m``), as sweep.csv."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip.lab.experiments.run_folder import CONFIG_FILE, SUMMARY_FILE, note_new, read_summary

SWEEP_FILE = "sweep.csv"
_COLUMNS = (
    "job", "overrides", "status", "reason", "method", "engine", "topology", "algorithm", "compression", "clipping",
    "data", "seed", "world_size", "averaged_test_accuracy", "averaged_test_loss", "local_test_accuracy_mean",
    "local_test_accuracy_worst", "local_test_accuracy_best", "consensus_distance_before",
    "consensus_distance_before_relative", "consensus_distance_after", "steps", "wall_time_s", "training_time_s",
    "exposed_wait_s", "overlapped_s", "bytes_sent_per_step",
)  # fmt: skip


def callback(*, ends_with_table: bool) -> Any:
    """Return the hydra callback (``hydra.callbacks`` in the configuration) that notes which folders are new.

    With ``ends_with_table`` it writes the table at the end of a multirun, and exits with status 1 if a run failed,
    because hydra itself only sees tasks that returned. The class is defined here to import hydra lazily.
    """
    from hydra.experimental.callback import Callback

    class RunCallback(Callback):
        def on_run_start(self, config: Any, **_: Any) -> None:
            note_new(config.hydra.run)

        def on_multirun_start(self, config: Any, **_: Any) -> None:
            note_new(config.hydra.sweep)

        def on_multirun_end(self, config: Any, **_: Any) -> None:
            if ends_with_table:
                summaries = finish_sweep(Path(config.hydra.sweep.dir))
                if any(summary["status"] != "completed" for summary in summaries):
                    raise SystemExit(1)

    return RunCallback()


def finish_sweep(folder: Path) -> list[dict[str, Any]]:
    """Write sweep.csv over the runs under ``folder``, print its path and why runs failed, and return the summaries.

    Each has the path of its run, relative to ``folder``, as ``job``.
    """
    found = {path.parent for name in (CONFIG_FILE, SUMMARY_FILE) for path in folder.rglob(name)}
    jobs = sorted(found, key=lambda job: _natural(job.relative_to(folder)))
    summaries = [{**read_summary(job), "job": str(job.relative_to(folder))} for job in jobs]
    write_csv(summaries, folder / SWEEP_FILE)
    for summary in summaries:
        if summary["status"] != "completed":
            print(f"job {summary['job']} {summary['status']}: {summary['reason']}")
    print(f"{len(summaries)} runs: {folder / SWEEP_FILE}")
    return summaries


def write_csv(summaries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write one row per run as CSV; missing values are left empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS, restval="", extrasaction="ignore")
        writer.writeheader()
        for summary in summaries:
            writer.writerow({**summary, "overrides": " ".join(summary["overrides"])})


def _natural(path: Path) -> tuple[tuple[int, str], ...]:
    """Return a natural sort key, by which 10 comes after 9."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in path.parts)
