"""``--help``: the configuration's files, in which every option has a comment."""

import re
from pathlib import Path

import pytest
from repository import CONFIGS

from gossip.lab.experiments.option_help import help_text

FILES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name != "experiment"]
ANSWERED_BY_THE_FILE = ("_target_", "name", "options", "defaults", "hydra", "partition")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_option_has_a_comment_and_help_shows_it(path: Path) -> None:
    is_bench = "bench" in path.relative_to(CONFIGS).as_posix()
    text = help_text("script.py", CONFIGS, path.stem if path.parent == CONFIGS else "bench" if is_bench else "train")
    for line in path.read_text().split("\nhydra:")[0].splitlines():
        if match := re.fullmatch(r"\s*([\w/]+):(?: ([^#\n]*?))?\s*(?:  # (.*))?", line):
            key, value, comment = match.groups()
            if key not in ANSWERED_BY_THE_FILE and (path.parent != CONFIGS or value or comment):
                assert comment, f"{key} has no comment"
                assert f"\n  {line}\n" in f"{text}\n"


def test_help_shows_what_the_command_can_choose() -> None:
    text = help_text("scripts/train.py", CONFIGS, "train")
    for name in ("topology=de_bruijn", "experiment=smoke"):
        assert f"\n{name}\n" in text
    assert "bench." not in text
