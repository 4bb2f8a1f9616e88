"""What a user's module registers is chosen on the command line like the files of a group."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import CommandLine
from hydra.core.config_store import ConfigStore
from repository import CONFIGS

import gossip
from gossip.lab.experiments import train_command
from gossip.lab.experiments.config_store import REGISTRIES

MODULE = '''
import gossip
import topologies
from topologies import Round, Topology


@topologies.register("two_halves")
def two_halves(world_size: int, *, shift: int = 0) -> Topology:
    """Each half averages inside itself; every other round the halves meet in pairs."""
    half = world_size // 2
    inside = Round.from_groups(world_size, [range(half), range(half, 2 * half)])
    across = Round.from_groups(world_size, [(rank, half + (rank + shift) % half) for rank in range(half)])
    return Topology.from_rounds([inside, across])


@topologies.register("needs_width")
def needs_width(world_size: int, *, width: int) -> Topology:
    return topologies.build("ring", world_size)


@gossip.COMPRESSIONS.register("my_bits")
def my_bits(*, bits: int = 8) -> gossip.Compression:
    """As few bits as I like."""
    return gossip.ModuloQuantization(bits)


@gossip.ALGORITHMS.register("half_mixed")
class HalfMixed(gossip.AdaptThenCombine):
    """Half of what the neighbours say."""

    def __init__(self, *, gamma: float = 0.5) -> None:
        super().__init__(gamma)
'''
IMPORTS = "imports=[user_topologies]"


@pytest.fixture(autouse=True)
def _own_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "user_topologies.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    yield
    for group in REGISTRIES:
        ConfigStore.instance().repo.pop(group, None)
    sys.modules.pop("user_topologies", None)


def test_what_is_registered_runs_by_its_name(command: CommandLine, tmp_path: Path) -> None:
    small = ("engine=virtual", "launch.world_size=4", "training.steps=2", "figures=false")
    others = ("algorithm=half_mixed", "compression=my_bits", "compression.options.bits=4")
    status, errors = command(IMPORTS, "topology=two_halves", "topology.options.shift=1", *others, *small)
    assert (status, errors.count("error")) == (0, 0)
    (config,) = (tmp_path / "outputs").glob("*/config.yaml")
    assert "name: two_halves" in config.read_text()
    summary = json.loads((config.parent / "summary.json").read_text())
    assert summary["topology"] == "two_halves"
    assert summary["algorithm"] == "HalfMixed(gamma=0.5)"
    assert summary["compression"] == gossip.ModuloQuantization(4).describe()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((IMPORTS, "topology=two_halfs"), "there is no topology=two_halfs; did you mean two_halves? Available: "),
        ((IMPORTS, "topology=needs_width"), "topology.options.width has no value; set it"),
    ],
)
def test_what_cannot_be_chosen_is_one_line(arguments: tuple[str, ...], text: str, command: CommandLine) -> None:
    status, errors = command(*arguments)
    assert status == 2
    assert text in errors
    assert len(errors.splitlines()) == 1


def test_help_lists_what_is_registered_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--help", IMPORTS])
    assert train_command.main(CONFIGS, "train") == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("topology=two_halves")
    assert lines[first + 1].strip() == ("Each half averages inside itself; every other round the halves meet in pairs.")
    assert lines[first + 2].strip() == "topology.options.shift=0"
    assert {"topology=ring", "compression=my_bits", "algorithm=half_mixed", "algorithm=awc"} <= set(lines)
