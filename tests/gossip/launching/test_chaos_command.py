"""``gossip chaos``: a program is struck, started again, and counted; what cannot be run is refused."""

import re
import subprocess
import sys
from pathlib import Path

import lone_ranks
import pytest

from gossip.launching import chaos_command


@pytest.mark.slow
def test_program_is_struck_and_started_again(tmp_path: Path) -> None:
    path = lone_ranks.script(tmp_path, "train.py", "gossip.launch(train)")
    own = [str(path), "max(members) > 3", ""]  # until one was started again twice
    command = [sys.executable, "-m", "gossip", "chaos", "--ranks", "3", "--every", "2", "--", sys.executable, *own]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 ranks train\nkill: process ")
    found = re.search(r"(\d+) steps: (\d+) kill, (\d+) started again; goodput ([0-9.]+) of the", done.stdout)
    assert found is not None, done.stdout
    assert int(found[3]) >= 2
    assert 0 < float(found[4]) <= 1.2  # from what ranks say once a second
    assert len(lone_ranks.result_of(tmp_path)) >= 2
    noted = re.search(r"^(\d+) messages were mixed; 0 were not what was sent$", done.stdout, re.MULTILINE)
    assert noted is not None, done.stdout
    assert int(noted[1]) > 100


@pytest.mark.slow
def test_it_ends_when_all_have_left_that_were_told_to(tmp_path: Path) -> None:
    path = lone_ranks.script(tmp_path, "train.py", "gossip.launch(train)")
    command = [sys.executable, "-m", "gossip", "chaos", "--ranks", "2", "--every", "99s", "--seconds", "3s", "--"]
    command += [sys.executable, str(path), "False", ""]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert ": no faults; goodput " in done.stdout


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
