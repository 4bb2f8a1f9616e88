"""The examples of the pages and docstrings about other libraries, and about torchrun, run as they stand there."""

import doctest
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from examples import code, defined
from free_ports import free_port
from preloaded import TORCHRUN
from repository import REPOSITORY
from running import TIMEOUT_S, run, running, written
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, TrainingArguments

from gossip.integrations.transformers import GossipTrainer

EXAMPLES = {
    ("docs/lightning.md", 0): r"tensor\(\d+\.\d+\)",
    ("docs/lightning.md", 1): r"the averaged model's error: \d+\.\d{3}\s",
    ("docs/transformers.md", 0): r"\b27584\b",
    ("docs/schedule_free.md", 0): r"rank [01]: (\d\.\d{3})\s*rank [01]: \1\s",
}
"""What the example of a page prints."""


@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_an_example_of_a_page(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # where Lightning starts ranks itself
    finished = run(written(tmp_path, code(page, number)), tmp_path).succeeded()
    assert re.search(EXAMPLES[page, number], finished.stdout), finished.stdout


def test_the_example_of_accelerate_under_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code("docs/accelerate.md", 0))
    launcher = ("accelerate.commands.launch", "--cpu", "--num_processes", "2", "--main_process_port", str(free_port()))
    command = [sys.executable, "-m", *launcher, "example.py"]
    printed = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    assert re.search(r"^(the averaged model's error: \d+\.\d+\s+){3}$", printed.stdout), printed.stdout


def test_a_trainer_of_another_kind_gossips() -> None:
    trainer = defined("docs/transformers.md", 1, GossipTrainer=GossipTrainer, Seq2SeqTrainer=Seq2SeqTrainer)
    assert issubclass(trainer["GossipSeq2SeqTrainer"], Seq2SeqTrainer)


def test_the_loader_of_ranks_of_different_lengths(tmp_path: Path) -> None:
    names = {
        "GossipTrainer": GossipTrainer,
        "DataLoader": DataLoader,
        "model": torch.nn.Linear(8, 1),
        "args": TrainingArguments(str(tmp_path), per_device_train_batch_size=3, use_cpu=True, report_to=[]),
        "shard_of_this_rank": torch.arange(7),
    }
    trainer = defined("docs/transformers.md", 2, **names)["trainer"]
    assert [len(batch) for batch in trainer.get_train_dataloader()] == [3, 3, 1]


def test_the_example_of_prepare() -> None:
    result = doctest.testmod(importlib.import_module("gossip.integrations.accelerate"))
    assert (result.attempted > 0, result.failed) == (True, 0)


TEXT = (REPOSITORY / "docs" / "several_nodes.md").read_text()


def test_two_agents_of_torchrun_on_one_machine(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code("docs/several_nodes.md", 0))
    (command,) = re.findall(r"^    torchrun (--nnodes 2 .* train\.py)$", TEXT, re.MULTILINE)
    words = command.replace("node1:29500", f"127.0.0.1:{free_port()}").split()
    agent = functools.partial(running, tmp_path, *words, script=Path(TORCHRUN))
    with agent() as first, agent() as second:
        found = first.finished(), second.finished()
    assert [each.status for each in found] == [0, 0], found
    assert "4 ranks: [[1." in "".join(each.stdout for each in found)
