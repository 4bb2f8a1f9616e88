"""What Lightning's Trainer evaluates, finds and ends with by gossip, and what it cannot do and is refused."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_modules import Net, batches, trainer_of
from listening import logged
from ranks import on_ranks
from replicas import flat, gathered

from gossip import GossipError, launch
from gossip.communication import training_store
from gossip.integrations.lightning import GossipStrategy


def validated(options: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """Validation after every other batch, in the middle of what is accumulated."""
    module = Net()
    strategy = GossipStrategy("ring", **options)
    trainer = trainer_of(strategy, val_check_interval=2, accumulate_grad_batches=3, limit_val_batches=1, max_epochs=1)
    trainer.fit(module, batches(), batches())
    return module.trained, module.validated, [float(trainer.callback_metrics["validated"]), module.num_steps]


class Stopped(Net):
    """Whose second validation raises."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if len(self.validated) == 2:
            raise RuntimeError("stopped here")


def stop() -> None:
    module = Stopped()
    trainer = trainer_of(GossipStrategy("ring"), val_check_interval=2, limit_val_batches=1, max_epochs=1)
    with pytest.raises(RuntimeError, match="stopped here"):
        trainer.fit(module, batches(), batches())
    assert torch.equal(flat(module), module.trained[-1]), "its own replica"
    assert trainer.model is module
    module.zero_grad()
    module.net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


class Signalled(Net):
    """That gets SIGUSR1 and SIGTERM, on all ranks, before its third batch."""

    def on_train_batch_start(self, _: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)


class RequeuesNothing(SLURMEnvironment):
    """As a job of SLURM's has it whose signal is SIGUSR1, but of the ranks that are there."""

    def __init__(self) -> None:
        super().__init__(auto_requeue=True, requeue_signal=signal.SIGUSR1)

    def validate_settings(self, *_: Any, **__: Any) -> None:
        """Whatever is asked for."""


def signal_all() -> None:
    """Training ends after the batch."""
    module = Signalled()
    place = {name: str(dist.get_rank()) for name in ("SLURM_PROCID", "SLURM_LOCALID")}
    of_slurm = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0", **place}
    with mock.patch.dict(os.environ, of_slurm), pytest.raises(SIGTERMException), logged("ERROR") as texts:
        trainer_of(GossipStrategy("ring"), plugins=RequeuesNothing()).fit(module, batches())
    assert len(module.trained) == 3
    (text,) = texts
    assert text.startswith(f"rank {dist.get_rank()}: signal {signal.SIGUSR1:d}: the job is not requeued")


def validate() -> None:
    """On the average, or on each replica; training goes on as if nobody had looked."""
    trained, seen, found = validated({})
    assert gathered(torch.tensor(found)).unique(dim=0).shape[0] == 1
    assert found[1] == 2
    assert len(seen) == 2
    for number, average in enumerate(seen):
        assert torch.equal(*gathered(average))
        expected = gathered(trained[2 * number + 1]).mean(0)
        torch.testing.assert_close(average, expected, rtol=1e-12, atol=0)
    own, seen, _ = validated({"evaluate_averaged": False})
    assert all(map(torch.equal, own, trained))
    assert torch.equal(seen[1], own[3])
    assert not torch.equal(*gathered(seen[1]))


@pytest.mark.parametrize("function", [validate, stop, signal_all])
def test_what_the_trainer_evaluates_and_how_it_ends(function: Callable[[], None]) -> None:
    launch(function, world_size=2)


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
