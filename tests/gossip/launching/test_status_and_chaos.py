"""``gossip status`` shows a training as it is; ``gossip chaos`` strikes a program, starts it again, and counts."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from unittest import mock

import lone_ranks
import pytest
from running import running

from gossip.elastic.training_status import RankStatus
from gossip.launching import chaos_command, status_command

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


def chaos(folder: Path, options: str, until: str, given: str = "") -> str:
    """What the command prints of a training that goes on until something holds."""
    own = [sys.executable, str(lone_ranks.script(folder, "train.py", "gossip.launch(train)", mesh=given)), until, ""]
    command = [sys.executable, "-m", "gossip", "chaos", *options.split(), "--", *own]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_program_is_struck_and_started_again(tmp_path: Path) -> None:
    printed = chaos(tmp_path, "--ranks 3 --every 2", until="max(members) > 3")  # one was started again twice
    assert printed.startswith("3 ranks train\nkill: process ")
    found = re.search(r"(\d+) steps: (\d+) kill, (\d+) started again; goodput ([0-9.]+) of the", printed)
    assert found is not None, printed
    assert int(found[3]) >= 2
    assert 0 < float(found[4]) <= 1.2  # from what ranks say once a second
    assert len(lone_ranks.result_of(tmp_path)) >= 2
    noted = re.search(r"^(\d+) messages were mixed; 0 were not what was sent$", printed, re.MULTILINE)
    assert noted is not None, printed
    assert int(noted[1]) > 100


@pytest.mark.slow
def test_it_ends_when_all_have_left_that_were_told_to(tmp_path: Path) -> None:
    options, given = "--ranks 2 --every 99s --seconds 3s", "algorithm=gossip.Asynchronous(4)"
    printed = chaos(tmp_path, options, until="False", given=given)
    assert ": no faults; goodput " in printed
    assert re.search(r"^\d{2,} messages were mixed; 0 were not what was sent$", printed, re.MULTILINE)


def test_a_message_that_nobody_sent_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    notes = r'printf "sent 0 1 7 a\nmixed 0 1 7 a\nmixed 0 1 7 b\n" > $GOSSIP_MESSAGE_NOTES/$$.txt'
    assert chaos_command.main(["--ranks", "2", "--", "sh", "-c", notes]) == 1
    assert "4 messages were mixed; 2 were not what was sent" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--kinds", "kill,freze", "--", "true"], "there is no kind 'freze' of fault; choose from kill, freeze, leave"),
        (["--ranks", "1", "--", "true"], "--ranks must be at least 2"),
        (["--every", "0", "--", "true"], "--every above 0"),
        ([], "the following arguments are required: program"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        chaos_command.main(arguments)
    assert text in capsys.readouterr().err


def test_program_that_does_not_train_ends_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_command, "_BEGINNING_S", 0.2)
    assert chaos_command.main(["--ranks", "2", "--", "sleep", "60"]) == 2
    assert "0 of 2 ranks train after 0.2 s; the program must call gossip.launch" in capsys.readouterr().err
