"""``python -m topologies``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import topologies
from topologies.__main__ import main


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(topologies.available())
    assert any("[local_size]" in line for line in lines)
    assert any("[seed=0]" in line for line in lines)


def test_options_of_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a, b.graphml"
    nx.write_graphml(nx.cycle_graph(6), path)
    arguments = ["describe", "graph", "--world-size", "6", "--option", f"graph={path}"]
    assert main([*arguments, "--option", "weights=metropolis_hastings"]) == 0
    captured = capsys.readouterr()
    assert "SLEM            1\n" in captured.out
    assert captured.err.startswith("python -m topologies: warning: ")
    assert captured.err.count("\n") == 1


def test_local_steps_and_a_warm_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ring", "--world-size", "8", "--every", "4", "--warmup-rounds", "10"]
    assert main(["describe", *arguments]) == 0
    complete, ring = topologies.build("complete", 8), topologies.build("ring", 8)
    assert capsys.readouterr().out == f"{complete.then(ring.every(4), after=10).describe()}\n"
    path = tmp_path / "ring.svg"
    assert main(["draw", *arguments, "--output", str(path)]) == 0
    assert "<!-- round 13: " in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["describe", "ring"], "required: world_size=N"),
        (["compare", "--csv", "8", "ring"], "required: world_size=N"),
        (["describe", "ring", "8", "world_size=4"], "unrecognized arguments: 8"),
        (["describe", "ring", "--world-size", "many"], "argument world_size: invalid int value: 'many'"),
        (["describe", "ring", "--nproc", "4"], "there is no --nproc; the number of ranks is given as world_size=8"),
        (["describe", "ring", "--world-size", "4", "--every", "0"], "k must be at least 1, got 0"),
        (["describe", "random_matching", "--world-size", "6", "--option", "seed"], "takes KEY=VALUE, got 'seed'"),
        (
            ["describe", "random_matching", "--world-size", "6", "--option", "seed=1", "--option", "seed=2"],
            "seed is given twice",
        ),
        (["describe", "graph", "--world-size", "6", "--option", "graph=no.gexf"], "does not exist"),
        (["draw", "ring", "--world-size", "6", "--output", "ring.pdf"], "must end in .svg or .png"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments)
    except SystemExit as exit_:  # argparse leaves this way
        status = exit_.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("given", "name", "options"),
    [
        (["directed=False", "m=None"], "equi_static", {"directed": False, "m": None}),
        (["directed=true", "m=null"], "equi_static", {"directed": True, "m": None}),
        (["shape=3,4"], "torus", {"shape": (3, 4)}),
        (["weights='lazy'"], "margulis", {"weights": "lazy"}),
    ],
)
def test_options_as_json_and_as_the_list_shows_them(
    given: list[str], name: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    world_size = 16 if name == "margulis" else 12
    pairs = [part for pair in given for part in ("--option", pair)]
    assert main(["describe", name, f"world_size={world_size}", "--json", *pairs]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == topologies.build(name, world_size, **options).describe().to_dict()


def test_a_plain_number_is_the_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "ring", "8", "--every", "2"]) == 0
    assert capsys.readouterr().out == f"{topologies.build('ring', 8).every(2).describe()}\n"
    network = ["--latency-us", "50", "--bandwidth-gbps", "1", "--message-mb", "40"]
    assert main(["recommend", "16", *network, "ring"]) == 0
    assert "\n16 ranks, 1 rank per node" in capsys.readouterr().out


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "topologies", "describe"]
    done = subprocess.run([*command, "ring", "--world-size", "4"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("topology        ring\n")
    wrong = subprocess.run([*command, "ring", "--world-size", "-4"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
