"""What a report says in sentences, and which columns come first."""

from __future__ import annotations

from typing import Any

import pytest
import report_documents

from gossip.lab.report.columns import best, columns
from gossip.lab.report.report_document import read_document
from gossip.lab.report.report_markdown import markdown
from gossip.lab.report.report_page import render_page
from gossip.lab.report.verdict import verdict

TEST = "(95 % interval, Student's t over 20 pairs of the same seed)"


def compared(label: str, mean: float, ends: list[float] | None, name: str = "average_difference", **more: Any) -> Any:
    """A row that is compared with all-reduce's."""
    row = report_documents.row(label, **more)
    row["values"][name] = {"mean": mean, "spread": 0.1, "count": 20 if ends else 1, "interval": ends}
    return row


def sentences(rows: list[dict[str, Any]], **changes: Any) -> list[str]:
    return list(verdict(read_document(report_documents.document(rows, **changes))))


@pytest.mark.parametrize(
    ("mean", "ends", "found"),
    [
        (-0.03, [-0.19, 0.14], "no significant difference"),
        (-0.72, [-0.89, -0.55], "significantly worse"),
        (0.50, [0.10, 0.90], "significantly better"),
    ],
)
def test_the_best_setting_is_held_against_all_reduce(mean: float, ends: list[float], found: str) -> None:
    rows = [report_documents.row("all-reduce"), compared("star", mean - 1, [-3.0, -2.0]), compared("ring", mean, ends)]
    (sentence,) = sentences(rows)
    start = "16 ranks, iid: of 2 gossip settings ring (adapt_while_communicating) has the best averaged model, "
    assert sentence.startswith(f"{start}its accuracy less all-reduce's, in points: ")
    assert f"{found} {TEST}; it sends " in sentence
    assert sentence.endswith("of all-reduce's.")


def test_each_number_of_ranks_partition_and_condition_has_a_sentence_and_is_ranked_by_itself() -> None:
    places = [{"world_size": 16}, {"world_size": 64}, {"partition": "by_class(2)"}, {"condition": "data=cifar10"}]
    rows = [
        compared(label, difference, [difference - 0.1, difference + 0.2], **place)
        for number, place in enumerate(places)
        for label, difference in (("ring", -1.0 - 4.0 * (number % 2)), ("star", -2.0))
    ]
    assert [sentence.partition(" (")[0] for sentence in sentences(rows)] == [
        f"{place}: of 2 gossip settings {label}"
        for place, label in (
            ("16 ranks, iid", "ring"),
            ("64 ranks, iid", "star"),
            ("16 ranks, by_class(2)", "ring"),
            ("16 ranks, iid, data=cifar10", "star"),
        )
    ]
    (sentence,) = sentences(rows[:1])
    assert "the averaged model of ring (adapt_while_communicating): its accuracy less all-reduce's" in sentence
    document = read_document(report_documents.document(rows))
    (column,) = (each for each in columns(document) if each.name == "average_difference")
    assert best(document.rows, column) == {0, 3, 4, 7}


@pytest.mark.parametrize(
    ("ends", "count", "said"),
    [
        (None, 1, "of one seed, which says nothing about how sure that is"),
        ([-0.1, -0.1], 20, "the same with all 20 seeds, from which no interval follows"),
        ([-0.2, -0.1], 2, "of 2 seeds, which says little about how sure that is"),
    ],
)
def test_what_no_interval_supports_is_not_called_significant(ends: list[float] | None, count: int, said: str) -> None:
    row = compared("ring", -0.1, ends)
    row["values"]["average_difference"]["count"] = count
    (sentence,) = sentences([row])
    assert said in sentence
    assert "significant" not in sentence


def test_a_loss_is_better_below_one() -> None:
    metric = {"name": "loss", "higher_is_better": False, "target": None}
    rows = [
        report_documents.row("all-reduce"),
        compared("ring", 0.97, [0.95, 0.99], "loss_ratio"),
        compared("star", 1.2, [1.1, 1.3], "loss_ratio"),
    ]
    (sentence,) = sentences(rows, metric=metric)
    assert "ring" in sentence
    assert "its loss as a part of all-reduce's: 0.970 (0.950 to 0.990), significantly better" in sentence


def test_page_and_markdown_begin_with_the_verdict() -> None:
    document = read_document(report_documents.document([compared("ring", -0.1, [-0.2, 0.1])]))
    (sentence,) = verdict(document)
    assert sentence in render_page(document).replace("&#39;", "'")
    assert markdown(document).startswith(f"- {sentence}\n\n")
