"""Names of loggers on the command line, and in what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import CommandLine

from gossip.lab.experiments.console_table import print_sweep


@pytest.mark.parametrize("argument", ["logger=wandbb", "logger=[jsonl,wandbb]"])
def test_choice_of_an_unknown_name_lists_those_there_are(command: CommandLine, argument: str) -> None:
    status, words = command(argument)
    assert status == 2
    assert (
        words == "error: there is no logger=wandbb; did you mean wandb? Available: jsonl, mlflow, tensorboard, wandb\n"
    )


def test_lists_of_loggers_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summaries = [
        {"job": str(job), "status": "failed", "reason": "it", "overrides": ["logger=[wandb,mlflow]", f"a=[b,{job}]"]}
        for job in range(2)
    ]
    print_sweep(summaries, tmp_path)
    words = " ".join(capsys.readouterr().out.split())
    assert "2 runs logger=[wandb,mlflow]" in words
    assert "a=[b,0]" in words
