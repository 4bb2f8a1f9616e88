"""``--help``: every option of the configuration's files, with its comment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import composed
from omegaconf import OmegaConf
from repository import CONFIGS

from gossip.lab.experiments.option_help import help_text

FILES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "experiment"]
ANSWERED_BY_THE_FILE = ("_target_", "name", "options", "defaults", "hydra", "partition")


def commented_lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """Key, value and comment of each line, but for what hydra reads."""
    for line in path.read_text().split("\nhydra:")[0].splitlines():
        if match := re.fullmatch(r"\s*([\w/]+):(?: ([^#\n]*?))?\s*(?:  # (.*))?", line):
            yield match[1], (match[2] or "").strip(), match[3] or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_option_has_a_comment_and_help_shows_it(path: Path) -> None:
    name = path.stem if path.parent == CONFIGS else "train"
    if "bench" in path.relative_to(CONFIGS).as_posix():
        name = "bench"
    text = " ".join(help_text("script.py", CONFIGS, name).split())
    for key, value, comment in commented_lines(path):
        if key in ANSWERED_BY_THE_FILE or (path.parent == CONFIGS and not value and not comment):
            continue
        assert comment, f"{key} has no comment"
        shown = f"{key}={value} {comment}" if value else f"{key} {comment}"
        assert " ".join(shown.split()) in text


def test_help_names_options_as_the_command_line_takes_them() -> None:
    text = help_text("scripts/train.py", CONFIGS, "train")
    own = dict(re.findall(r"^  ([\w.]+)=(\S+)  ", text, re.MULTILINE))
    config = OmegaConf.create(composed())
    own["launch.world_size"] = own["world_size"]
    for key in ("training.epochs", "launch.world_size", "seed", "wrapper.bucket_cap_mb"):
        assert float(own[key]) == float(OmegaConf.select(config, key))
    for name in ("topology=de_bruijn", "experiment=smoke"):
        assert f"\n{name}\n" in text
    assert "bench." not in text
