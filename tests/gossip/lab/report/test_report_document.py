"""Reading the result document of a sweep, and the files that it becomes."""

import base64
import csv
import gzip
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_documents import document, failed_row, row, value, write

import gossip.lab.report
import topologies


def test_csv_has_one_line_per_row_and_json_is_the_document(tmp_path: Path) -> None:
    last = row("all-reduce", values={"averaged_loss": value(2.5, count=1)})
    whole = document([row("ring"), failed_row("torus"), last])
    write(whole, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == whole
    with (tmp_path / "results.csv").open() as file:
        ring, torus, all_reduce = csv.DictReader(file)
    assert (ring["label"], ring["world_size"], ring["seeds"], ring["status"]) == ("ring", "16", "0 1 2", "completed")
    assert float(ring["averaged_accuracy"]) == whole["rows"][0]["values"]["averaged_accuracy"]["mean"]
    assert float(ring["averaged_accuracy_spread"]) == 0.0021
    assert ring["commands"].count("; ") == 2
    assert (torus["averaged_accuracy"], torus["averaged_accuracy_spread"], torus["num_failed"]) == ("", "", "3")
    assert torus["reasons"].startswith("seed 0: RuntimeError")
    assert (all_reduce["averaged_loss"], all_reduce["averaged_loss_spread"], all_reduce["topology"]) == ("2.5", "", "")


def compared_row(label: str, **changes: Any) -> dict[str, Any]:
    """A row that was tuned and compared."""
    differences = {"average_difference": (-0.125, [-0.3, 0.05]), "loss_ratio": (1.02, [0.99, 1.05])}
    trials = [
        {"value": 0.1, "accuracy": 0.9625, "loss": 0.125, "reason": ""},
        {"value": 0.2, "accuracy": 0.1, "loss": None, "reason": ""},
        {"value": 0.4, "accuracy": None, "loss": None, "reason": "because"},
    ]
    whole = row(label, **changes)
    of_values = {name: {**(value(mean, 0.5) or {}), "interval": ends} for name, (mean, ends) in differences.items()}
    return {
        **whole,
        "values": {**whole["values"], **of_values},
        "tuning": {"parameter": "optimizer.lr", "seed": 0, "value": 0.1, "trials": trials},
    }


TRIED = "0.1: accuracy 0.9625, loss 0.1250; 0.2: accuracy 0.1000, loss not finite; 0.4: because"


def test_csv_and_page_have_intervals_and_trials_where_there_are_any(tmp_path: Path) -> None:
    _, text = written(document([compared_row("ring"), row("all-reduce")]), tmp_path)
    with (tmp_path / "results.csv").open() as file:
        ring, all_reduce = csv.DictReader(file)
    assert [float(ring[f"average_difference{end}"]) for end in ("", "_low", "_high")] == [-0.125, -0.3, 0.05]
    assert (ring["tuned"], ring["tuned_value"], ring["trials"]) == ("optimizer.lr", "0.1", TRIED)
    assert all_reduce["average_difference_low"] == all_reduce["tuned"] == ""
    for said in (
        "ring, 96.3 %, 0.12 points below all-reduce (",
        "-0.12 (-0.30 to 0.05)",
        "0.1, at the end of the grid",
        f"optimizer.lr with seed 0: {TRIED}",
    ):
        assert said in text


def test_markdown_is_one_line_per_row(tmp_path: Path) -> None:
    write(document([compared_row("ring"), row("all-reduce"), failed_row("torus")]), tmp_path)
    sentence, _, _, _, headings, alignment, *lines = (tmp_path / "results.md").read_text().splitlines()
    ring, all_reduce, torus = lines
    assert sentence.startswith("- ring, 96.3 %, 0.12 points below all-reduce (")
    assert {line.count("|") for line in (headings, alignment, ring, all_reduce, torus)} == {headings.count("|")}
    assert headings.startswith("| setting | optimizer.lr | accuracy of the averaged model | ")
    assert ring.startswith("| ring | 0.1, at the end of the grid | ")
    # Time and bytes to the target, and those of a step.
    assert "| -0.12 (-0.30 to 0.05) | 1.624 ± 0.010 s | 20.03 MiB | 5.8 ms | 73.24 KiB | " in ring
    assert ring.endswith(" | 1.020 (0.990 to 1.050) | 280 ± 8 |")
    assert all_reduce.endswith(" | - | 210 ± 8 |")  # rounds to the target
    assert torus.startswith("| torus | - | - | ")


class Checker(HTMLParser):
    """Checks that every element ends where it must and that nothing is loaded, and gathers the text."""

    VOID = frozenset({"meta", "input", "img", "wbr", "br", "link"})
    LOADING = frozenset({"src", "srcset", "xlink:href", "data", "action", "poster"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.identifiers: list[str | None] = []
        self.feed(page)
        assert self.open == []
        assert len(set(self.identifiers)) == len(self.identifiers)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "b", "a document's text has become markup"
        if tag not in self.VOID:
            self.open.append(tag)
        named = dict(attrs)
        assert not self.LOADING & named.keys()
        assert tag == "a" or "href" not in named
        self.identifiers += [named["id"]] if "id" in named else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def written(whole: dict[str, Any], folder: Path) -> tuple[str, str]:
    """The markup of a document's page, found to be sound, and its text."""
    write(whole, folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"url\((?!#)|@import", page)
    return page, Checker(page).text


def chart_data(page: str) -> dict[str, Any]:
    """What the charts of a page are drawn from."""
    (packed,) = re.findall(r'id="chart-data">([^<]*)<', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


AWKWARD = '<b onclick="x">&amp;\'</b>\u2028]]>--></script>'


def test_page_escapes_everything(tmp_path: Path) -> None:
    changes = {"label": AWKWARD, "partition": AWKWARD, "engine": AWKWARD, "reasons": [AWKWARD], "commands": [AWKWARD]}
    other = {**row("ring"), **changes, "status": "partly failed", "values": {"averaged_loss": value(1.0)}}
    texts = {AWKWARD: AWKWARD}
    whole = document(
        [row("ring"), other], title=AWKWARD, description=AWKWARD, settings=texts, cluster={"description": AWKWARD},
        environment=texts,
    )  # fmt: skip
    page, text = written(whole, tmp_path)
    assert page.count("</script>") == page.count("<script")
    names = chart_data(page)["charts"][0]["spec"]["encoding"]["color"]["scale"]["domain"]
    assert names == ["ring, virtual", f"{AWKWARD}, {AWKWARD}"]
    assert text.count(AWKWARD) >= 12


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("ring")], "1 setting, 3 runs, none failed."),
        ([failed_row("ring")], "Nothing to draw"),
        ([row("ring", values=dict.fromkeys(row("ring")["values"]), curves=None)], "Nothing to draw"),
        ([row("ring", curves=None), row("all-reduce", curves=None)], "Nothing to draw"),
        ([row("ring", seeds=[0], values={"averaged_accuracy": value(0.5, None, 1)})], "50.00 %"),
    ],
    ids=["one row", "failed", "all null", "no curves", "one seed"],
)
def test_page_of_an_unusual_sweep(rows: list[dict[str, Any]], expected: str, tmp_path: Path) -> None:
    _, text = written(document(rows), tmp_path)
    assert expected in text


@pytest.mark.parametrize(
    "curves",
    [
        {"step": [1], "bytes": [10], "time_s": [0.5], "metric": [0.9], "consensus": [0.1]},
        {"step": [1, 2, 3], "bytes": [5] * 3, "time_s": [1.0] * 3, "metric": [0.5] * 3, "consensus": [0.2] * 3},
        {"step": [1, 2], "bytes": [None, None], "time_s": [1, None], "metric": [None, 1], "consensus": [None, 1]},
        {"step": [1, 2], "bytes": [1, 2], "time_s": [1e-9, 1e9], "metric": [1e30, -3], "consensus": [1e-300, 9]},
    ],
    ids=["one point", "constant", "gaps", "extreme"],
)  # fmt: skip
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_page_of_unusual_curves(curves: dict[str, Any], metric: str, tmp_path: Path) -> None:
    rows = [row("ring", curves=curves, values={}), row("no communication", curves=curves)]
    about = {"name": metric, "higher_is_better": metric == "accuracy", "target": None}
    page, _ = written(document(rows, metric=about), tmp_path)
    for chart in chart_data(page)["charts"]:
        for axis in "xy":
            low, high = chart["spec"]["encoding"][axis]["scale"]["domain"]
            assert -math.inf < low < high < math.inf


def test_page_of_a_sweep_of_many_topologies_is_small(tmp_path: Path) -> None:
    names = topologies.available()[::3]
    rows = [{**row("ring", world_size=n), "label": name} for name in names for n in (25, 64, 1024)]
    page, _ = written(document(rows), tmp_path)
    assert len(page.encode()) < 600_000


def test_page_has_the_licences_of_what_draws(tmp_path: Path) -> None:
    page, _ = written(document([row("ring")]), tmp_path)
    for holder in ("University of Washington Interactive Data Lab", "Mike Bostock", "Joachim Wester"):
        assert holder in page
    assert "Mike Bostock" not in written(document([failed_row("ring")]), tmp_path)[0]


def luminance(colour: str) -> float:
    """Of WCAG 2, as is the contrast."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_of_the_page_stand_out(scheme: int) -> None:
    css = (Path(gossip.lab.report.__file__).parent / "report.css").read_text()
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", re.findall(r":root \{(.*?)\}", css, re.DOTALL)[scheme]))
    texts, lines = ("ink", "faint", "link", "bad", "best"), ("strong-rule", *(f"c{number}" for number in range(8)))
    for name, paper, least in [
        *((name, paper, 4.5) for name in texts for paper in ("paper", "raised")),
        *((name, "paper", 3.0) for name in lines),
    ]:
        darker, lighter = sorted(luminance(colours[each]) for each in (name, paper))
        assert (lighter + 0.05) / (darker + 0.05) >= least, (name, paper)


def test_vendored_files_are_those_that_their_list_names() -> None:
    folder = Path(gossip.lab.report.__file__).parent / "vendored"
    lines = re.findall(r"^\| `(\S+)` \| .* `([0-9a-f]{64})` \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in lines} == {path.name for path in folder.glob("*.js")}
    assert all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest for name, digest in lines)
