"""The command line in this process."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from composing import CommandLine
from hydra._internal.hydra import Hydra
from repository import CONFIGS

from gossip.lab.experiments import train_command
from gossip.launching import fork_server


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Run the command line of "train" or "sweep" in this process; its exit status."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")
    monkeypatch.setenv(train_command.NAME_VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fork_server, "start", lambda _: None)
    # Hydra composes once more only to see whether the configuration chooses a sweep, which the command line says.
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)
    handler = signal.getsignal(signal.SIGTERM)

    def run(name: str, *arguments: str) -> int:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *arguments])
        return train_command.main(CONFIGS, name)

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def command(main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """That of "train"; its exit status and what it wrote to stderr."""
    return lambda *arguments: (main("train", *arguments), capsys.readouterr().err)
