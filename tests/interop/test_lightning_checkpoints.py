"""Checkpoints of Lightning's Trainer by gossip: the average in the file, every rank's replica beside it."""

from __future__ import annotations

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
from lightning_modules import NUM_BATCHES, Net, batches, flat, network, trainer_of
from torch import nn
from torch.amp.grad_scaler import GradScaler

from gossip import launch
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
            "moments": [state["exp_avg"].clone() for state in optimizer.state_dict()["state"].values()],
            "rate": optimizer.param_groups[0]["lr"],
            "steps": (module.num_steps, trainer.global_step),
            "scale": scaler.get_scale(),
        }


RUNS = {
    "plain": Run({"step_in_backward": False}, {"gradient_clip_val": 0.5}),
    "fused, float16": Run({}, {}, half=True),
    "weights averaged": Run({}, {}, averages=True),
}


def interrupted(run: Run, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    whole = run.fit(1)
    checkpoints = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    run.fit(1, enable_checkpointing=True, callbacks=[Killed(), checkpoints])
    resumed = run.fit(7, os.path.join(folder, "epoch=1.ckpt"))
    return whole, resumed


class Looking(Net):
    """That looks at its parameters after each validation, when the callbacks have saved."""

    def on_validation_end(self) -> None:
        self.seen = [*getattr(self, "seen", []), flat(self)]


def saved_on_the_way(folder: str) -> tuple[Any, ...]:
    """Saved inside validation, the newest two, the last one; and after every third step."""
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
    goes_on = all(map(torch.equal, plain.trained, module.trained)) and len(plain.trained) == 2 * NUM_BATCHES
    return module.trained, sorted(os.listdir(folder)), goes_on, best.best_model_path, module.seen


class Restored(pl.Callback):
    """The replica that training goes on from."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.replica, self.step = flat(module), trainer.model.step


def restored(path: str, strategy: Any = None, **options: Any) -> tuple[torch.Tensor, int, int]:
    found = Restored()
    trainer = trainer_of(strategy or GossipStrategy("ring"), max_epochs=3, callbacks=[found], **options)
    trainer.fit(Net(), batches(), ckpt_path=path)
    return found.replica, found.step, trainer.global_step


def everything(folder: str) -> dict[str, Any]:
    outcomes: dict[str, Any] = {
        name: interrupted(run, os.path.join(folder, str(number))) for number, (name, run) in enumerate(RUNS.items())
    }
    on_the_way = os.path.join(folder, "on the way")
    outcomes["on the way"] = saved_on_the_way(on_the_way)
    best = outcomes["on the way"][3]
    outcomes["best"] = restored(best)
    lonely = os.path.join(folder, "alone.ckpt")
    if dist.get_rank() == 0:
        shutil.copy(best, lonely)
    dist.barrier()
    outcomes["alone"] = restored(lonely)
    of_ddp = os.path.join(folder, "ddp")
    trainer_of("ddp", max_epochs=1, enable_checkpointing=True, callbacks=[ModelCheckpoint(of_ddp, "ddp")]).fit(
        Net(), batches()
    )
    outcomes["of ddp"] = restored(os.path.join(of_ddp, "ddp.ckpt"))
    linked = ModelCheckpoint(os.path.join(folder, "linked"), save_last="link")
    module = Net()
    trainer_of(GossipStrategy("ring"), max_epochs=1, enable_checkpointing=True, callbacks=[linked]).fit(
        module, batches()
    )
    outcomes["linked"] = *restored(os.path.join(folder, "linked", "last.ckpt")), module.trained[-1]
    outcomes["url"] = refused()
    return outcomes


def refused() -> str:
    class Saves(Net):
        def on_train_start(self) -> None:
            with pytest.raises(ValueError, match="next to the checkpoint") as caught:
                self.trainer.save_checkpoint("memory://folder/x.ckpt")
            self.text = str(caught.value)

    module = Saves()
    trainer_of(GossipStrategy("ring"), max_epochs=1).fit(module, batches())
    return module.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[str, Any]]:
    return launch(everything, str(folder), world_size=2)


@pytest.mark.parametrize("name", RUNS)
def test_killed_run_goes_on_bit_for_bit(outcomes: list[dict[str, Any]], name: str) -> None:
    for ranks in outcomes:
        whole, resumed = ranks[name]
        assert torch.equal(resumed["replica"], whole["replica"])
        assert torch.equal(resumed["in the end"], whole["in the end"])
        assert all(map(torch.equal, resumed["moments"], whole["moments"]))
        assert [resumed[what] for what in ("rate", "steps", "scale")] == [
            whole[what] for what in ("rate", "steps", "scale")
        ]
    first, second = (ranks[name][0] for ranks in outcomes)
    assert not torch.equal(first["moments"][0], second["moments"][0]), "every rank has an optimizer of its own"
    assert torch.equal(first["in the end"], second["in the end"])


def test_file_holds_the_average(outcomes: list[dict[str, Any]], folder: Path) -> None:
    replicas = [ranks["on the way"][0] for ranks in outcomes]
    on_the_way = folder / "on the way"
    for path in on_the_way.glob("*.ckpt"):
        step = torch.load(path, weights_only=False)["global_step"]
        loaded = Net.load_from_checkpoint(path, map_location="cpu")
        expected = (replicas[0][step - 1] + replicas[1][step - 1]) / 2
        torch.testing.assert_close(flat(loaded), expected, rtol=1e-12, atol=0)


def test_folders_come_and_go_with_their_checkpoints(outcomes: list[dict[str, Any]], folder: Path) -> None:
    _, files, goes_on, _, _ = outcomes[0]["on the way"]
    assert goes_on, "training goes on as if nothing had been saved"
    names = [file for file in files if file.endswith(".ckpt")]
    assert {name for name in names if f"{name}.gossip" not in files} == {"weights.ckpt"}
    assert len(files) == 2 * len(names) - 1
    assert len(names) == 2 + 1 + 3 + 1
    for name in names:
        if name != "weights.ckpt":
            assert len(list((folder / "on the way" / f"{name}.gossip").glob("step_*"))) == 1


def test_validation_ends_with_the_average_that_it_began_with(outcomes: list[dict[str, Any]]) -> None:
    first, second = (ranks["on the way"][4] for ranks in outcomes)
    assert len(first) == 4
    assert all(map(torch.equal, first, second))


def test_replicas_saved_on_the_way_are_restored(outcomes: list[dict[str, Any]]) -> None:
    for ranks in outcomes:
        replica, found, _ = ranks["best"]
        assert torch.equal(replica, ranks["on the way"][0][found - 1])
    assert not torch.equal(outcomes[0]["best"][0], outcomes[1]["best"][0])


@pytest.mark.parametrize("name", ["alone", "of ddp"])
def test_without_replicas_all_ranks_go_on_alike(outcomes: list[dict[str, Any]], name: str) -> None:
    (first, step, _), (second, _, _) = (ranks[name] for ranks in outcomes)
    assert torch.equal(first, second)
    assert step == 0
    assert not torch.equal(first, flat(network()))


def test_link_to_a_checkpoint_finds_the_replicas(outcomes: list[dict[str, Any]]) -> None:
    for ranks in outcomes:
        replica, step, _, trained = ranks["linked"]
        assert torch.equal(replica, trained)
        assert step == NUM_BATCHES


def test_url_is_refused(outcomes: list[dict[str, Any]]) -> None:
    assert "memory://folder/x.ckpt" in outcomes[0]["url"]
