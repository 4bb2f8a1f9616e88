"""What a report says in sentences, and which columns come first."""

from typing import Any

import pytest
import report_documents

from gossip.lab.report.report_page import best, columns, verdict


def compared(label: str, mean: float, ends: list[float] | None, name: str = "average_difference", **more: Any) -> Any:
    """A row that is compared with all-reduce's."""
    row = report_documents.row(label, **more)
    row["values"][name] = {"mean": mean, "spread": 0.1, "count": 20 if ends else 1, "interval": ends}
    return row


def sentences(rows: list[dict[str, Any]], **changes: Any) -> list[str]:
    return list(verdict(report_documents.read(report_documents.document(rows, **changes))))


@pytest.mark.parametrize(
    ("mean", "ends", "difference", "found"),
    [
        (-0.03, [-0.19, 0.14], "0.03 points below", "-0.19 to +0.14; no significant difference"),
        (-2.72, [-2.89, -0.55], "2.7 points below", "-2.9 to -0.6; significantly worse"),
        (0.50, [0.10, 0.90], "0.50 points above", "+0.10 to +0.90; significantly better"),
    ],
)
def test_the_best_is_held_against_all_reduce(mean: float, ends: list[float], difference: str, found: str) -> None:
    rows = [report_documents.row("all-reduce"), compared("star", mean - 1, [-3.0, -2.0]), compared("ring", mean, ends)]
    (sentence,) = sentences(rows)
    assert sentence == (
        f"Best of 2: ring, 96.3 %, {difference} all-reduce (95 % interval {found}). It sends 73.24 KiB per step, "
        "1.05 times as much as all-reduce; the target is predicted after 1.624 s, all-reduce's 2.879 s."
    )


def test_each_number_of_ranks_partition_and_condition_has_a_sentence_and_is_ranked_by_itself() -> None:
    places = [{"world_size": 16}, {"world_size": 64}, {"partition": "by_class(2)"}, {"condition": "data=cifar10"}]
    places = [{"condition": "data=digits", **place} for place in places]
    rows = [
        compared(label, difference, [difference - 0.1, difference + 0.2], **place)
        for number, place in enumerate(places)
        for label, difference in (("ring", -1.0 - 4.0 * (number % 2)), ("star", -2.0))
    ]
    assert [sentence.partition(", 9")[0] for sentence in sentences(rows)] == [
        f"{place}, best of 2: {label}"
        for place, label in (
            ("16 ranks, iid, data=digits", "ring"),
            ("64 ranks, iid, data=digits", "star"),
            ("16 ranks, by_class(2), data=digits", "ring"),
            ("16 ranks, iid, data=cifar10", "star"),
        )
    ]
    (sentence,) = sentences(rows[:1])
    assert sentence.startswith("ring, 96.3 %, 1.0 points below all-reduce (")
    document = report_documents.read(report_documents.document(rows))
    (column,) = (each for each in columns(document) if each.name == "average_difference")
    assert best(document.rows, column) == {0, 3, 4, 7}


@pytest.mark.parametrize(
    ("ends", "count", "said"),
    [
        (None, 1, "(only one seed)"),
        ([-0.1, -0.1], 20, "(the same with all 20 seeds)"),
        ([-0.2, -0.1], 2, "(2 seeds: no interval)"),
    ],
)
def test_what_no_interval_supports_is_not_called_significant(ends: list[float] | None, count: int, said: str) -> None:
    row = compared("ring", -0.1, ends)
    row["values"]["average_difference"]["count"] = count
    (sentence,) = sentences([row])
    assert f"0.10 points below all-reduce {said}." in sentence


def test_a_loss_is_better_below_one() -> None:
    metric = {"name": "loss", "higher_is_better": False, "target": None}
    rows = [
        report_documents.row("all-reduce"),
        compared("ring", 0.97, [0.95, 0.99], "loss_ratio"),
        compared("star", 1.2, [1.1, 1.3], "loss_ratio"),
    ]
    (sentence,) = sentences(rows, metric=metric)
    said = "3.0 % below all-reduce (95 % interval -5.0 to -1.0; significantly better)"
    assert sentence.startswith(f"Best of 2: ring, loss 0.175, {said}. ")
