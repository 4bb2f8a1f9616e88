"""``gossip status``: a training is shown as it is; silence, waits and losses; what cannot be read."""

import contextlib
import io
import os
import re
import signal
import time
import urllib.request
from pathlib import Path
from unittest import mock

import lone_ranks
import pytest
from running import running

from gossip.elastic.training_status import RankStatus
from gossip.launching import status_command

KEY = "0123456789abcdef0123456789abcdef"
RATE = r"^ +0 +\d+ +\d[\d.e+]* +0\b"  # of rank 0, once it has written twice


def status_of(address: str, key: str = KEY) -> str:
    """What the command prints."""
    printed = io.StringIO()
    to_text = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
    with mock.patch.dict(os.environ, {"GOSSIP_KEY": key}), to_text[0], to_text[1]:
        status_command.main([address])
    return printed.getvalue()


def test_training_is_shown_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSIP_KEY", KEY)
    path = lone_ranks.script(tmp_path, "train.py", "gossip.launch(train)")
    with lone_ranks.served() as (address, _), contextlib.ExitStack() as ranks:
        monkeypatch.setenv("GOSSIP_STORE", address)
        monkeypatch.setenv("GOSSIP_GROUPS", "3")
        monkeypatch.setenv("GOSSIP_STATUS", "1")
        assert "no rank at" in status_of(address)
        for _ in range(3):
            ranks.enter_context(running(tmp_path, "len(members) < 0", "", script=path))
        lone_ranks.wait_until(lambda: lone_ranks.trained_by(tmp_path, 0, 1, 2))
        os.kill(lone_ranks.read(tmp_path / "member1")["pid"], signal.SIGKILL)
        lone_ranks.wait_until(lambda: lone_ranks.trained_by(tmp_path, 0, 2))
        while not re.search(RATE, shown := status_of(address), re.MULTILINE):
            pass  # each look takes some seconds
        with running(tmp_path, "status", address, "--page", "0", script=lone_ranks.COMMAND) as serving:
            where = serving.first_line()
            while "<pre></pre>" in (page := urllib.request.urlopen(where).read().decode()):
                time.sleep(0.1)
        refused = status_of(address, "another key of at least 32 characters")
    assert shown.startswith("generation 1: 2 ranks train (ranks 0, 2)\nnewest checkpoint: none\n")
    assert "lost: rank 1: " in shown
    assert "<pre>generation 1: 2 ranks train (ranks 0, 2)\nnewest checkpoint: none\n" in page
    assert re.search("^error: .*GOSSIP_KEY", refused, re.MULTILINE), refused


def test_silence_and_waits_are_told() -> None:
    first = RankStatus(1, 10.0, 2, (0, 1, 2), (), 0.0, [(3, "closed")], step=10, saved_step=7)
    before = {0: first, 1: first}
    now = {0: first._replace(number=3, said_at=12.0, step=30, waits_for=[1], waited_s=0.5, num_late=4), 1: first}
    assert status_command.text(before, now, 2.5).splitlines() == [
        "generation 2: 3 ranks train (ranks 0, 1, 2)",
        "newest checkpoint: step 7",
        "rank  step  steps/s  late",
        "   0    30       10     4  waits for rank 1, 0.5 s",
        "   1    10              0  silent for 2.5 s",
        "   2                       has said nothing yet",
        "lost: rank 3: closed",
    ]
    assert "no rank has said anything for 2.5 s" in status_command.text(before, before, 2.5)


def test_store_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_command.main(["127.0.0.1:1"]) == 2
    assert "error: there is no key-value store at 127.0.0.1:1: Connection refused" in capsys.readouterr().err
