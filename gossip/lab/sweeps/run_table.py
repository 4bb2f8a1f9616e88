"""The table over the runs of a multirun (``-m``), as sweep.csv and on the terminal."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip.lab.experiments.run_folder import CONFIG_FILE, SUMMARY_FILE, read_summary
from gossip.lab.experiments.terminal import print_table

SWEEP_FILE = "sweep.csv"
_COLUMNS = (
    "job", "overrides", "status", "reason", "method", "engine", "topology", "algorithm", "compression", "clipping",
    "data", "seed", "world_size", "averaged_test_accuracy", "averaged_test_loss", "local_test_accuracy_mean",
    "local_test_accuracy_worst", "local_test_accuracy_best", "consensus_distance_before",
    "consensus_distance_before_relative", "consensus_distance_after", "steps", "wall_time_s", "training_time_s",
    "exposed_wait_s", "overlapped_s", "bytes_sent_per_step",
)  # fmt: skip
_PRINTED = {
    "averaged_test_accuracy": ("averaged\naccuracy", "{:.2%}"),
    "local_test_accuracy_mean": ("local\nmean", "{:.2%}"),
    "local_test_accuracy_worst": ("local\nworst", "{:.2%}"),
    "consensus_distance_before": ("consensus\ndistance", "{:.2g}"),
    "consensus_distance_before_relative": ("relative\ndistance", "{:.2g}"),
    "steps": ("steps", "{}"),
    "training_time_s": ("seconds\nin steps", "{:.2f}"),
    "exposed_wait_s": ("seconds\nwaited", "{:.2f}"),
    "bytes_sent_per_step": ("bytes sent\nper step", "{:,.0f}"),
}
"""The columns of the table on the terminal: their heads, and how their numbers are written."""


def table_callback() -> Any:
    """Return the hydra callback (``hydra.callbacks`` in the configuration) that ends a multirun with its table.

    The callback exits with status 1 if a run failed, because hydra itself only sees tasks that returned.
    """
    from hydra.experimental.callback import Callback

    class TableCallback(Callback):
        """Gathers the runs at the end of a multirun."""

        def on_multirun_end(self, config: Any, **_: Any) -> None:
            summaries = finish_sweep(Path(config.hydra.sweep.dir))
            if any(summary["status"] != "completed" for summary in summaries):
                raise SystemExit(1)

    return TableCallback()


def finish_sweep(folder: Path) -> list[dict[str, Any]]:
    """Write sweep.csv over the runs under ``folder``, print the table and return the summaries.

    Each has the path of its run, relative to ``folder``, as ``job``.
    """
    found = {path.parent for name in (CONFIG_FILE, SUMMARY_FILE) for path in folder.rglob(name)}
    jobs = sorted(found, key=lambda job: _natural(job.relative_to(folder)))
    summaries = [{**read_summary(job), "job": str(job.relative_to(folder))} for job in jobs]
    write_csv(summaries, folder / SWEEP_FILE)
    _print(summaries, folder)
    return summaries


def _print(summaries: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Print one line per run, then the reason of each failure."""
    from rich.markup import escape  # rich would interpret a list such as logger=[jsonl,wandb] as a style tag
    from rich.table import Table

    overrides = [summary["overrides"] for summary in summaries]
    common = [each for each in overrides[0] if all(each in other for other in overrides)] if len(overrides) > 1 else []
    table = Table("job", "overrides", "status", title=escape(" ".join([f"{len(summaries)} runs", *common])))
    for head, _ in _PRINTED.values():
        table.add_column(head, justify="right")
    for summary in summaries:
        own = [override for override in summary["overrides"] if override not in common]
        missing = "-" if summary["status"] == "completed" else ""
        cells = (
            missing if summary.get(name) is None else form.format(summary[name]) for name, (_, form) in _PRINTED.items()
        )
        table.add_row(summary["job"], escape("\n".join(own)), summary["status"], *cells)
    if num_left_out := print_table(table):
        print(f"{num_left_out} more columns are in {SWEEP_FILE}: the terminal has no room for them")
    for summary in summaries:
        if summary["status"] != "completed":
            print(f"job {summary['job']} {summary['status']}: {summary['reason']}")
    print(f"sweep folder: {folder}")


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
