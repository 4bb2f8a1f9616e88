"""The columns of the table of results: the settings in which rows differ, what was tuned, and the values."""

from collections.abc import Sequence
from dataclasses import dataclass

from gossip.lab.report.charts import DIVIDING, setting, varying
from gossip.lab.report.quantities import BYTES, FRACTION, NUMBER, POINTS, RATIO, SECONDS, Quantity
from gossip.lab.report.report_document import Document, Row, Setting

SETTINGS = {
    name: "Ranks" if name == "world_size" else name.capitalize()
    for name in Setting.model_fields
    if name not in ("label", "method")
}
"""The titles of the settings besides the label, which has the topology with its options already."""
TO_ALL_REDUCE = {"accuracy": "average_difference", "loss": "loss_ratio"}
"""For each metric, the value that compares a row with all-reduce."""
_COSTS = ("predicted_time_to_target_s", "bytes_to_target", "predicted_step_time_s", "bytes_per_step")


@dataclass(frozen=True)
class Column:
    """A column of the table, which shows a text or, if it has a quantity, a value, of which one may be the best.

    Either "higher" or "lower" values are better, or neither, among the rows of some methods: without communication
    nothing is sent, which is not an achievement.
    """

    name: str
    title: str
    explanation: str = ""
    quantity: Quantity | None = None
    better: str | None = None
    among: tuple[str, ...] = ("gossip", "ddp")

    @property
    def heading(self) -> str:
        """Its title and explanation in one line."""
        return f"{self.title} {self.explanation}".strip().lower()

    def text(self, row: Row) -> str | None:
        """Return what the column shows of a row; None if there is nothing."""
        if self.quantity is not None:
            value = row.values.get(self.name)
            return None if value is None else self.quantity.value_text(value)
        if self.name in SETTINGS:
            return setting(row, self.name)
        return row.tuning.text if row.tuning is not None and row.tuning.parameter == self.name else None


COLUMNS = (
    Column("averaged_accuracy", "Accuracy", "of the averaged model", FRACTION, "higher"),
    Column("averaged_loss", "Loss", "of the averaged model", NUMBER, "lower"),
    Column("local_accuracy_mean", "Local accuracy, mean", "over the ranks", FRACTION, "higher"),
    Column("local_accuracy_worst", "Local accuracy, worst", "of the ranks", FRACTION, "higher"),
    Column("average_difference", "To all-reduce", "accuracy in points", POINTS, "higher", ("gossip",)),
    Column("loss_ratio", "Loss to all-reduce", "ratio", RATIO, "lower", ("gossip",)),
    Column("worst_difference", "Worst local to all-reduce", "accuracy in points", POINTS, "higher", ("gossip",)),
    Column("worst_loss_ratio", "Worst local loss to all-reduce", "ratio", RATIO, "lower", ("gossip",)),
    Column("consensus_distance", "Consensus distance", "absolute, at the end", NUMBER, "lower", ("gossip",)),
    Column("consensus_distance_relative", "Consensus distance", "relative, at the end", NUMBER, "lower", ("gossip",)),
    Column("bytes_per_step", "Sent per step", "by one rank", BYTES, "lower"),
    Column("bytes_to_target", "Sent to target", "by one rank", BYTES, "lower"),
    Column("rounds_to_target", "Rounds to target", "steps", NUMBER, "lower"),
    Column("predicted_step_time_s", "Step time", "predicted", SECONDS, "lower"),
    Column("predicted_time_to_target_s", "Time to target", "predicted", SECONDS, "lower"),
    Column("predicted_total_time_s", "Total time", "predicted", SECONDS, "lower"),
    Column("steps", "Steps", "local updates", NUMBER),
    Column("training_time_s", "Run time", "of the experiment itself", SECONDS),
    Column("local_loss_mean", "Local loss, mean", "over the ranks", NUMBER, "lower"),
    Column("local_loss_worst", "Local loss, worst", "of the ranks", NUMBER, "lower"),
)  # fmt: skip
"""The columns of all values that rows have."""


def text_columns(rows: Sequence[Row]) -> tuple[list[Column], list[Column]]:
    """Return the columns of the settings in which the rows differ, and those of what was tuned."""
    settings = [Column(name, SETTINGS[name]) for name in varying(rows, list(SETTINGS)) if name != "topology"]
    tuned = dict.fromkeys(row.tuning.parameter for row in rows if row.tuning is not None)
    return settings, [Column(name, name) for name in tuned]


def columns(document: Document) -> list[Column]:
    """Return the columns of the values that any row has, the deciding ones first."""
    rows, metric = document.rows, document.metric.name
    present = [column for column in COLUMNS if any(row.values.get(column.name) is not None for row in rows)]
    if same_steps(rows) is not None:
        present = [column for column in present if column.name != "steps"]
    first = [f"averaged_{metric}", TO_ALL_REDUCE[metric], *_COSTS, "averaged_loss", "local_accuracy_worst"]
    return sorted(present, key=lambda column: first.index(column.name) if column.name in first else len(first))


def same_steps(rows: Sequence[Row]) -> str | None:
    """Return the number of steps if all rows that have one agree, so that no column is needed; otherwise None."""
    means = {mean for row in rows if (mean := row.mean("steps")) is not None}
    return NUMBER.text(means.pop()) if len(means) == 1 else None


def best(rows: Sequence[Row], column: Column) -> set[int]:
    """Return the indices of the best rows among those with the same number of ranks, partition and condition.

    If all rows of a group are equal, or there is only one, none is best.
    """
    groups: dict[tuple[str | None, ...], dict[int, float]] = {}
    for index, row in enumerate(rows):
        mean = row.mean(column.name)
        if column.better is not None and mean is not None and row.method in column.among:
            groups.setdefault(tuple(setting(row, name) for name in DIVIDING), {})[index] = mean
    found: set[int] = set()
    for means in groups.values():
        if len(set(means.values())) > 1:
            extreme = max(means.values()) if column.better == "higher" else min(means.values())
            found.update(index for index, mean in means.items() if mean == extreme)
    return found
