"""What Lightning's Trainer cannot do by gossip: refused by name before it begins."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning_modules import Net, batches, trainer_of
from ranks import on_ranks

from gossip import GossipError
from gossip.communication import training_store
from gossip.integrations.lightning import GossipStrategy


def fit(module: Any = None, options: dict[str, Any] | None = None, **of_trainer: Any) -> None:
    """In this process alone: nothing is trained."""
    trainer_of(GossipStrategy(**(options or {})), devices=1, **of_trainer).fit(module or Net(), batches())


def fit_as_one_that_joins() -> None:
    with mock.patch.object(training_store, "_store", dist.HashStore()):
        fit()


class ClipsItself(Net):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        raise AssertionError("not called")


class ClipsInTurn(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(self.optimizers(), 0.5, "norm")


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sync_batchnorm": (lambda: fit(sync_batchnorm=True), ValueError, r'sync_batchnorm=True.*buffers="average"'),
    "value": (
        lambda: fit(gradient_clip_val=0.5, gradient_clip_algorithm="value"),
        ValueError,
        'gradient_clip_algorithm="value".*step_in_backward=False',
    ),
    "clips itself": (lambda: fit(ClipsItself()), ValueError, r"ClipsItself.configure_gradient_clipping.*False"),
    "clips in turn": (lambda: fit(ClipsInTurn()), GossipError, r"clip_gradients\(\) finds no gradients.*False"),
    "clips twice": (
        lambda: fit(options={"clip_grad_norm": 1.0}, gradient_clip_val=0.5),
        ValueError,
        "gradient_clip_val=0.5 of the Trainer and clip_grad_norm=1.0",
    ),
    "on exception": (
        lambda: fit(callbacks=[ModelCheckpoint(save_on_exception=True)], enable_checkpointing=True),
        ValueError,
        r"ModelCheckpoint\(save_on_exception=True\).*every_n_train_steps",
    ),
    "average of a rank": (
        lambda: fit(callbacks=[EMAWeightAveraging()]),
        ValueError,
        "EMAWeightAveraging averages the replica of each rank.*StochasticWeightAveraging",
    ),
    "joins": (
        fit_as_one_that_joins,
        ValueError,
        r"this process joins a training, but the Trainer counts.*fit\(ckpt_path.*Fabric",
    ),
    "comes back": (
        lambda: fit(options={"on_peer_loss": "continue", "partition_timeout": 9}),
        ValueError,
        "partition_timeout=9 would let a rank come back.*the Trainer counts.*leave it out",
    ),
    "scaler": (lambda: GossipStrategy(scaler=None), TypeError, r'GossipStrategy got scaler=None.*precision="16-mixed"'),
}


@on_ranks(1, anew=True)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    os.chdir(tmp_path)  # a callback writes what the refusal leaves
    for call, kind, text in REFUSED.values():
        with pytest.raises(kind, match=text):
            call()
