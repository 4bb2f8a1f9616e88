"""The figure of overlap: gossip and DDP on a slow link, over one time axis. Its times are never looked at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lab_hosts import why_no_hosts
from repository import REPOSITORY
from running import TIMEOUT_S, run_here

NUM_LAYERS, NUM_STEPS = 3, 3
MESSAGE, WAIT = "#fd8d3c", "#de2d26"


def draw(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "overlap_figure.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )


def panels(svg: str) -> list[str]:
    return re.split(r'id="axes_\d"', svg.partition('id="legend_1"')[0])[1:]


@pytest.mark.slow
@pytest.mark.root
def test_gossip_is_drawn_above_ddp_over_the_same_time(tmp_path: Path) -> None:
    if missing := why_no_hosts():
        pytest.skip(missing)
    path = tmp_path / "overlap.svg"
    done = draw(path, "--num-layers", str(NUM_LAYERS), "--width", "40", "--batch-size", "2")
    assert done.returncode == 0, done.stderr
    svg = path.read_text()
    gossip, ddp = panels(svg)
    assert re.search(r"<!-- GossipDataParallel, one_peer_hypercube: 3 steps in \d+ ms -->", gossip)
    assert re.search(r"<!-- torch's DistributedDataParallel: 3 steps in \d+ ms -->", ddp)
    assert "links of 200 Mbit/s" in svg
    assert gossip.count(f"fill: {MESSAGE}") >= (NUM_STEPS - 1) * NUM_LAYERS  # those of the last step come later
    assert ddp.count(f"fill: {MESSAGE}") >= NUM_STEPS * NUM_LAYERS
    assert ddp.count(f"fill: {WAIT}") >= NUM_STEPS
    ends = [re.findall(r"<!-- ([\d.]+) -->", panel) for panel in (gossip, ddp)]
    assert not ends[0]  # one axis, below both
    assert ends[1]


@pytest.mark.parametrize(
    ("option", "value", "said"), [("--rate", "fast", "rate must be a number"), ("--width", "x", "")]
)
def test_a_bad_option_is_refused_in_one_line(option: str, value: str, said: str, tmp_path: Path) -> None:
    done = run_here("overlap_figure.py", tmp_path / "overlap.svg", option, value)
    assert done.status != 0
    assert said in done.last_line
    assert not (tmp_path / "overlap.svg").exists()
