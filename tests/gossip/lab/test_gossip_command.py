"""``gossip COMMAND``: what it starts, and what it says where it starts nothing."""

import runpy
import sys
from collections.abc import Callable

import pytest

from gossip.lab import gossip_command

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["/somewhere/bin/gossip", *arguments])
        return gossip_command.main(), *capsys.readouterr()

    return run


@pytest.mark.parametrize("arguments", [(), ("-h",)])
def test_gossip_alone_lists_its_commands(command: Command, arguments: tuple[str, ...]) -> None:
    status, stdout, stderr = command(*arguments)
    assert (status, stderr) == (0, "")
    for name, what in gossip_command.APPLICATIONS.items():
        assert f"gossip {name}  {what}\n" in stdout


@pytest.mark.parametrize("name", ["train", "sweep", "bench"])
def test_gossip_command_shows_the_options_of_its_configuration(command: Command, name: str) -> None:
    status, stdout, _ = command(name, "--help")
    assert status == 0
    assert stdout.startswith(f"gossip {name} [group=file ...] [option=value ...]\n")


@pytest.mark.parametrize("number", [["world_size=2,3"], ["--world-size", "2,3"], ["launch.world_size=2,3"]])
@pytest.mark.parametrize(("application", "key"), [("sweep", "launch.world_size"), ("bench", "bench.world_size")])
def test_the_number_of_ranks_has_one_spelling_and_the_old_ones(
    application: str, key: str, number: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("gossip.lab.experiments.train_command.main", lambda *_: seen.extend(sys.argv) or 0)
    monkeypatch.setattr(sys, "argv", ["gossip", application, "seed=1", *number, "-m"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module("gossip", run_name="__main__")
    assert seen == [f"gossip {application}", "seed=1", f"{key}=2,3", "-m"]


def test_gossip_probe_shows_its_options(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        command("probe", "--help")
    assert capsys.readouterr().out.startswith("usage: gossip probe ")


def test_gossip_refuses_another_command_in_one_line(command: Command) -> None:
    available = "Available: train, sweep, bench, probe, store, status, chaos\n"
    assert command("trian", "seed=1") == (2, "", f"error: there is no gossip trian; did you mean train? {available}")
    for key in ("nproc", "worldsize", "launch.nprocs"):
        hint = f"error: there is no {key}; the number of ranks is given as world_size=8\n"
        assert command("train", f"{key}=4") == (2, "", hint)


def test_gossip_command_without_extra_says_what_to_install(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"torch": "torch", "no_such_package": "no-such-package", "nor_this_one": "nor-this-one"}
    monkeypatch.setattr(gossip_command, "PACKAGES", packages)
    status, stdout, stderr = command("train", "--help")
    assert (status, stdout) == (2, "")
    assert stderr == (
        "error: gossip train needs no-such-package, nor-this-one; install what the applications need in a clone of "
        "the repository: pip install '.[lab]'\n"
    )
