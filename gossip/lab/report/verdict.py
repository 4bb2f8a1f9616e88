"""The findings of a sweep in sentences: one for each number of ranks, partition of the data and condition."""

from collections.abc import Iterator

from gossip.lab.report.charts import RESULTS, panels
from gossip.lab.report.columns import TO_ALL_REDUCE, best, columns
from gossip.lab.report.quantities import BYTES, SECONDS
from gossip.lab.report.report_document import FEWEST_SEEDS, Document, Metric, Row, Value


def verdict(document: Document) -> Iterator[str]:
    """Yield the sentences in the order of the rows; none if no gossip row is compared with all-reduce."""
    metric = document.metric
    name = TO_ALL_REDUCE[metric.name]
    column = next((each for each in columns(document) if each.name == name), None)
    if column is None:
        return
    winners = best(document.rows, column)
    for panel in panels(document.rows):
        compared = [each for each in panel.series if each.row.method == "gossip" and each.row.mean(name) is not None]
        if not compared:
            continue
        # Among equal rows, choose the one that sends the least.
        found = [each for each in compared if each.index in winners] or compared
        chosen = min(found, key=lambda each: each.row.mean("bytes_per_step") or 0.0)
        value = chosen.row.values[name]
        assert value is not None
        place = ", ".join(filter(None, [panel.title, f"best of {len(compared)}" if len(compared) > 1 else ""]))
        parts = [chosen.name, _result(chosen.row, metric), _difference(value, metric)]
        reference = next((each.row for each in panel.series if each.row.method == "ddp"), None)
        text = f"{': '.join(filter(None, [place, ', '.join(filter(None, parts))]))}.{_costs(chosen.row, reference)}"
        yield text[0].upper() + text[1:] if place else text


def _result(row: Row, metric: Metric) -> str | None:
    mean = row.mean(f"averaged_{metric.name}")
    if mean is None:
        return None
    return f"{100 * mean:.1f} %" if metric.name == "accuracy" else f"loss {RESULTS[metric.name].text(mean)}"


def _difference(value: Value, metric: Metric) -> str:
    """Return a difference in words: in points of accuracy, or in percent of all-reduce's loss."""
    is_accuracy = metric.name == "accuracy"
    mean, *ends = (each if is_accuracy else 100 * (each - 1) for each in (value.mean, *(value.interval or ())))
    decimals = 1 if abs(mean) >= 1 else 2
    size = f"{abs(mean):.{decimals}f} {'points' if is_accuracy else '%'}"
    text = f"{size} {'above' if mean > 0 else 'below'} all-reduce" if mean else "the same as all-reduce"
    if not ends or value.count < FEWEST_SEEDS:
        return f"{text} ({'only one seed' if value.count == 1 else f'{value.count} seeds: no interval'})"
    low, high = ends
    if low == high:
        return f"{text} (the same with all {value.count} seeds)"
    if low <= 0 <= high:
        found = "no significant difference"
    else:
        found = f"significantly {'better' if (low > 0) == is_accuracy else 'worse'}"
    return f"{text} (95 % interval {low:+.{decimals}f} to {high:+.{decimals}f}; {found})"


def _costs(row: Row, reference: Row | None) -> str:
    if reference is None:
        return ""
    parts = []
    own, other = row.mean("bytes_per_step"), reference.mean("bytes_per_step")
    if own is not None and other:
        parts.append(f"it sends {BYTES.text(own)} per step, {own / other:.2f} times as much as all-reduce")
    for name, what in (
        ("predicted_time_to_target_s", "the target is predicted after"),
        ("predicted_step_time_s", "a step is predicted to take"),
    ):
        own, other = row.mean(name), reference.mean(name)
        if own is not None and other is not None:
            parts.append(f"{what} {SECONDS.text(own)}, all-reduce's {SECONDS.text(other)}")
            break
    text = "; ".join(parts)
    return f" {text[0].upper()}{text[1:]}." if text else ""
