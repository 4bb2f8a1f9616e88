"""What a run shows while it trains: a bar on a terminal of any width, lines elsewhere."""

import io
import itertools
import re
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
from listening import logged

from gossip.lab.experiments import terminal

RECORD = {"loss": 0.123}


@pytest.mark.parametrize("width", [110, 60, 40])
def test_bar_makes_room_for_steps_and_loss(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: True)
    with terminal.progress_bar(12000, first_step=9998, visible=True) as show:
        show({"loss": 1.0})
        show(RECORD)
    for thread in threading.enumerate():
        if type(thread).__name__ == "_RefreshThread":  # rich ends it without waiting
            thread.join()
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue()).strip().splitlines()[-1].split("\r")[-1]
    assert len(text) <= width
    assert re.search(r"10000/12000 .*(-:--:--|\d:\d\d:\d\d) loss 0.123", text)


def test_without_a_terminal_a_line_says_every_30_s_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 8)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with logged("INFO") as lines:
        for visible in (True, False):
            with terminal.progress_bar(12, visible=visible) as show:
                for step in range(9):
                    show(RECORD | {"step": step})
    assert lines == [f"step {step} of 12: loss 0.123" for step in (3, 6, 9)]


@pytest.mark.parametrize("width", [80, 44, None])
def test_table_has_the_columns_that_fit_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
    monkeypatch.setenv("COLUMNS", str(width or 80))
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: width is not None)
    headings = ["setting", *(f"accuracy of the averaged model {number}" for number in range(6))]
    rows = [["random_regular(degree=3)", *(f"97.2{number} ± 0.31 %" for number in range(6))]]
    left_out = terminal.print_table("results", headings, rows)
    assert left_out == (headings[4:] if width == 80 else [] if width is None else headings[2:])
    terminal.print_text("no word is broken " * 9 + "w" * 90)
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue())
    assert all(len(line) <= width for line in text.splitlines() if width and line != "w" * 90)
    assert rows[0][1] in text
    words = {*" ".join(["results no word is broken \u2500", "w" * 90, *headings, *rows[0]]).split()}
    assert {re.sub("\u2500+", "\u2500", word) for word in text.split()} <= words


@pytest.mark.parametrize(("sent", "text"), [(1000, "0.9766 KiB"), (2**20, "1 MiB"), (483200 * 2**10, "471.9 MiB")])
def test_what_is_sent_is_in_the_unit_of_its_size(sent: int, text: str) -> None:
    summary = defaultdict(lambda: 1, bytes_sent_per_step=sent)
    assert terminal._rows(summary)["sent per rank and step"] == text
