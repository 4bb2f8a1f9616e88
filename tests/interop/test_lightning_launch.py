"""Ranks that Lightning starts itself, and ranks that torchrun starts for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

SCRIPT = """
import json, sys, warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import gossip.integrations.lightning

warnings.simplefilter("ignore")


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return (self.line(x) - x.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        self.replica, self.step = self.line.weight.tolist(), self.trainer.model.step
        self.world_size = self.trainer.model.world_size


quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
module = Net()
trainer = Trainer(accelerator="cpu", devices=2, strategy="gossip", max_epochs=2, **quiet)
torch.manual_seed(1)
trainer.fit(module, DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=2))
found = {"step": module.step, "world_size": module.world_size, "replica": module.replica}
found["average"] = module.line.weight.tolist()
Path(sys.argv[1], f"{trainer.global_rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize("starter", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]])
def test_script_trains_on_two_ranks(tmp_path: Path, starter: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "MASTER_PORT": str(free_port())}  # torchrun chooses its own
    command = [sys.executable, *starter, str(script), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, cwd=tmp_path, env=environment)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["step"] == second["step"] == 6
    assert first["world_size"] == 2
    assert first["replica"] != second["replica"]
    assert first["average"] == second["average"]
