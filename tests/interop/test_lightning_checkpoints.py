"""Checkpoints of Lightning's Trainer by gossip: the average in the file, every rank's replica beside it."""

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning_modules import NUM_BATCHES, Net, batches, network, trainer_of
from ranks import on_ranks
from replicas import assert_equal_states, flat, gathered
from torch import nn
from torch.amp.grad_scaler import GradScaler

from gossip.integrations.lightning import GossipStrategy

NUM_EPOCHS = 4


class Killed(pl.Callback):
    """Ends the run before its third epoch, as a machine that is taken away does."""

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == NUM_EPOCHS // 2:
            raise RuntimeError("killed")


@dataclass(frozen=True)
class Run:
    """How a model is trained; dropout draws random numbers on every rank."""

    strategy: dict[str, Any]
    trainer: dict[str, Any]
    half: bool = False
    averages: bool = False

    def module(self) -> Any:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 1))
        return Net(layers if self.half else layers.double(), partial(torch.optim.AdamW, lr=0.05))

    def fit(self, seed: int, ckpt_path: str | None = None, **options: Any) -> dict[str, Any]:
        module = self.module()
        scaler = GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
        precision = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)} if self.half else {}
        strategy = GossipStrategy("ring", compression="int8", **self.strategy)
        averaging = [StochasticWeightAveraging(0.02, swa_epoch_start=1)] if self.averages else []
        options["callbacks"] = options.get("callbacks", []) + averaging
        trainer = trainer_of(strategy, max_epochs=NUM_EPOCHS, **self.trainer, **precision, **options)
        torch.manual_seed(seed + dist.get_rank())
        loader = batches(torch.float32 if self.half else torch.float64)
        if any(isinstance(callback, Killed) for callback in trainer.callbacks):
            with pytest.raises(RuntimeError, match="killed"):
                trainer.fit(module, loader, ckpt_path=ckpt_path)
        else:
            trainer.fit(module, loader, ckpt_path=ckpt_path)
        (optimizer,) = trainer.optimizers
        return {
            "replica": module.trained[-1],
            "in the end": flat(module),
            "moments": torch.cat([state["exp_avg"].flatten() for state in optimizer.state_dict()["state"].values()]),
            "rate": optimizer.param_groups[0]["lr"],
            "steps": (module.num_steps, trainer.global_step),
            "scale": scaler.get_scale(),
        }


RUNS = {
    "plain": Run({"step_in_backward": False}, {"gradient_clip_val": 0.5}),
    "fused, float16": Run({}, {}, half=True),
    "weights averaged": Run({}, {}, averages=True),
}


@on_ranks(2, anew=True)
def test_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for name, run in RUNS.items():
        whole = run.fit(1)
        checkpoints = ModelCheckpoint(f"{tmp_path}/{name}", "{epoch}", save_top_k=-1)
        run.fit(1, enable_checkpointing=True, callbacks=[Killed(), checkpoints])
        resumed = run.fit(7, f"{tmp_path}/{name}/epoch=1.ckpt")
        assert_equal_states(resumed, whole, name)
        assert not torch.equal(*gathered(whole["moments"])), "every rank has an optimizer of its own"
        assert torch.equal(*gathered(whole["in the end"]))


class Looking(Net):
    """That looks at its parameters after each validation, when the callbacks have saved."""

    def on_validation_end(self) -> None:
        self.seen = [*getattr(self, "seen", []), flat(self)]


def save_on_the_way(folder: Path) -> tuple[str, list[torch.Tensor]]:
    """Saved inside validation, the newest two, the last one; and after every third step: the best, all replicas."""
    plain, module = Net(), Looking()
    options = {"val_check_interval": 2, "limit_val_batches": 1, "max_epochs": 2}
    trainer_of(GossipStrategy("ring"), **options).fit(plain, batches(), batches())
    best = ModelCheckpoint(folder, "{step}-{validated:.6f}", "progress", mode="max", save_top_k=2, save_last=True)
    by_step = ModelCheckpoint(folder, "at-{step}", every_n_train_steps=3, save_top_k=-1)
    weights = ModelCheckpoint(folder, "weights", save_weights_only=True)
    trainer = trainer_of(
        GossipStrategy("ring"), enable_checkpointing=True, callbacks=[best, by_step, weights], **options
    )
    trainer.fit(module, batches(), batches())
    assert all(map(torch.equal, plain.trained, module.trained)), "training goes on as if nothing had been saved"
    assert len(plain.trained) == 2 * NUM_BATCHES
    assert len(module.seen) == 4
    assert all(torch.equal(*gathered(seen)) for seen in module.seen), "validation ends with the average"
    files = set(os.listdir(folder))
    names = {file for file in files if file.endswith(".ckpt")}
    assert {name for name in names if f"{name}.gossip" not in files} == {"weights.ckpt"}
    assert len(files) == 2 * len(names) - 1
    assert len(names) == 2 + 1 + 3 + 1
    replicas = [gathered(trained) for trained in module.trained]
    for name in names:
        assert name == "weights.ckpt" or len(list((folder / f"{name}.gossip").glob("step_*"))) == 1
        step = torch.load(folder / name, weights_only=False)["global_step"]
        loaded = flat(Net.load_from_checkpoint(folder / name, map_location="cpu"))
        torch.testing.assert_close(loaded, replicas[step - 1].mean(0), rtol=1e-12, atol=0)
    return best.best_model_path, module.trained


class Restored(pl.Callback):
    """The replica that training goes on from."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.replica, self.step = flat(module), trainer.model.step


def restored(path: str | Path) -> tuple[torch.Tensor, int]:
    found = Restored()
    trainer = trainer_of(GossipStrategy("ring"), max_epochs=3, callbacks=[found])
    trainer.fit(Net(), batches(), ckpt_path=path)
    return found.replica, found.step


@on_ranks(2, anew=True)
def test_what_is_saved_on_the_way_is_the_average_and_the_replicas_beside_it(tmp_path: Path) -> None:
    best, trained = save_on_the_way(tmp_path / "on the way")
    replica, step = restored(best)
    assert torch.equal(replica, trained[step - 1])
    assert not torch.equal(*gathered(replica))

    linked = ModelCheckpoint(tmp_path / "linked", save_last="link")
    module = Net()
    trainer_of(GossipStrategy("ring"), max_epochs=1, enable_checkpointing=True, callbacks=[linked]).fit(
        module, batches()
    )
    replica, step = restored(tmp_path / "linked" / "last.ckpt")
    assert torch.equal(replica, module.trained[-1])
    assert step == NUM_BATCHES

    if dist.get_rank() == 0:
        shutil.copy(best, tmp_path / "alone.ckpt")
    dist.barrier()
    of_ddp = ModelCheckpoint(tmp_path, "ddp")
    trainer_of("ddp", max_epochs=1, enable_checkpointing=True, callbacks=[of_ddp]).fit(Net(), batches())
    for name in ("alone.ckpt", "ddp.ckpt"):  # without replicas all ranks go on alike
        replica, step = restored(tmp_path / name)
        assert torch.equal(*gathered(replica))
        assert step == 0
        assert not torch.equal(replica, flat(network()))

    class Saves(Net):
        def on_train_start(self) -> None:
            with pytest.raises(ValueError, match=r"next to the checkpoint.*memory://folder/x\.ckpt"):
                self.trainer.save_checkpoint("memory://folder/x.ckpt")

    trainer_of(GossipStrategy("ring"), max_epochs=1).fit(Saves(), batches())
