"""The findings of a sweep in sentences: one for each number of ranks, partition of the data and condition."""

from __future__ import annotations

from collections.abc import Iterator

from gossip.lab.report.columns import best, columns
from gossip.lab.report.quantities import BYTES, POINTS, RATIO, SECONDS, Quantity
from gossip.lab.report.report_document import Document, Row, Value

_FEWEST = 3
"""The smallest number of seeds with which a difference is called significant."""

#: For each metric, the value that compares a row with all-reduce, its quantity, and its value if both are equal.
_COMPARED = {"accuracy": ("average_difference", POINTS, 0.0), "loss": ("loss_ratio", RATIO, 1.0)}


def verdict(document: Document) -> Iterator[str]:
    """Yield the sentences in the order of the rows; none if no gossip row is compared with all-reduce."""
    name, quantity, equal = _COMPARED[document.metric.name]
    column = next((each for each in columns(document) if each.name == name), None)
    if column is None:
        return
    places: dict[tuple[int, str | None, str | None], list[Row]] = {}
    for row in document.rows:
        places.setdefault((row.world_size, row.partition, row.condition), []).append(row)
    for (world_size, *others), rows in places.items():
        compared = [row for row in rows if row.method == "gossip" and row.values.get(name) is not None]
        if not compared:
            continue
        # Among equal rows, choose the one that sends the least.
        found = [rows[index] for index in sorted(best(rows, column))] or compared
        chosen = min(found, key=lambda row: row.mean("bytes_per_step") or 0.0)
        value = chosen.values[name]
        assert value is not None
        reference = next((row for row in rows if row.method == "ddp"), None)
        among = f"of {len(compared)} gossip settings {_named(chosen)} has the best averaged model, "
        alone = f"the averaged model of {_named(chosen)}: "
        yield (
            f"{', '.join([f'{world_size} ranks', *filter(None, others)])}: {among if len(compared) > 1 else alone}"
            f"{_compared(value, quantity, equal)}{_costs(chosen, reference)}."
        )


def _named(row: Row) -> str:
    extras = [text for text in (row.algorithm, row.compression) if text and text != "none"]
    return f"{row.label} ({', '.join(extras)})" if extras else row.label


def _compared(value: Value, quantity: Quantity, equal: float) -> str:
    what = "its accuracy less all-reduce's, in points: " if equal == 0.0 else "its loss as a part of all-reduce's: "
    text = what + quantity.value_text(value)
    if value.interval is None:
        return f"{text}, of one seed, which says nothing about how sure that is"
    if value.interval[0] == value.interval[1]:
        return f"{text}, the same with all {value.count} seeds, from which no interval follows"
    if value.count < _FEWEST:
        return f"{text}, of {value.count} seeds, which says little about how sure that is"
    low, high = value.interval
    if low <= equal <= high:
        found = "no significant difference"
    elif (low > equal) == (equal == 0.0):
        found = "significantly better"
    else:
        found = "significantly worse"
    return f"{text}, {found} (95 % interval, Student's t over {value.count} pairs of the same seed)"


def _costs(row: Row, reference: Row | None) -> str:
    if reference is None:
        return ""
    parts = []
    for name, what, quantity in (
        ("bytes_per_step", "sends {} per rank and step, {:.2f} of all-reduce's", BYTES),
        ("predicted_time_to_target_s", "is predicted to reach the target after {}, {:.2f} of all-reduce's", SECONDS),
    ):
        own, other = row.mean(name), reference.mean(name)
        if own is not None and other:
            parts.append(what.format(quantity.text(own), own / other))
    return f"; it {' and '.join(parts)}" if parts else ""
