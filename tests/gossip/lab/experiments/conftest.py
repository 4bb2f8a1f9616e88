"""The command line in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import CommandLine
from hydra._internal.hydra import Hydra
from repository import CONFIGS

from gossip.lab.experiments import train_command
from gossip.launching import fork_server


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[CommandLine]:
    """Run the command line in this process; its exit status and what it wrote to stderr."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.setenv(train_command.NAME_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fork_server, "start", lambda _: None)
    # Hydra composes once more only to see whether the configuration itself chooses a sweep, which train.yaml does not.
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["train.py", *arguments])
        status = train_command.main(CONFIGS, "train")
        return status, capsys.readouterr().err

    yield run
    signal.signal(signal.SIGTERM, handler)
