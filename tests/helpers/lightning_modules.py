"""Small modules for Lightning's Trainer, and the Trainer that trains them on two ranks."""

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from loops_by_hand import BATCH_SIZE, Case, samples
from loops_by_hand import network as network
from replicas import flat
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

NUM_BATCHES = 5  # of one rank in one epoch


def batches(dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    """What the Trainer deals out to the ranks."""
    return DataLoader(samples(2 * NUM_BATCHES, dtype), batch_size=BATCH_SIZE)


def batches_of(rank: int, epoch: int, dtype: torch.dtype = torch.float64, *, shuffles: bool = True) -> list[Any]:
    """What it deals out to one of them; Fabric, which shuffles nothing of itself, too."""
    dealt = samples(2 * NUM_BATCHES, dtype)
    sampler = DistributedSampler(dealt, 2, rank, shuffle=shuffles)
    sampler.set_epoch(epoch)
    return list(DataLoader(dealt, batch_size=BATCH_SIZE, sampler=sampler))


def precision(case: Case, mixed: Callable[..., Any]) -> dict[str, Any]:
    """Of the Trainer or Fabric, whose class of plugin is given."""
    if case.half is torch.float16:
        return {"plugins": mixed("16-mixed", "cpu", case.scaler())}
    return {"precision": "32-true" if case.half is None else "bf16-mixed"}


def module_of(library: Any = pl) -> type[Any]:
    """The class of module for one of the packages of the Trainer."""

    class Net(library.LightningModule):  # type: ignore[misc]
        """A regression; notes its own parameters at the end of training and of every batch, and those it validates."""

        def __init__(
            self, net: nn.Module | None = None, optimizer: Callable[[Any], Any] | None = None, interval: str = "step"
        ) -> None:
            super().__init__()
            self.net = network() if net is None else net
            self.make_optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
            self.interval = interval
            self.trained: list[torch.Tensor] = []
            self.validated: list[torch.Tensor] = []
            self.num_steps = 0

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            loss = mse_loss(self.net(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.validated.append(flat(self))
            self.log("validated", mse_loss(self.net(x), y), sync_dist=True)
            self.log("progress", float(self.trainer.global_step))

        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer(self.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

        def on_train_batch_end(self, *_: Any) -> None:
            self.trained.append(flat(self.trainer.model))  # of some algorithms the values are combined for that
            self.num_steps = getattr(self.trainer.model, "step", 0)

    return Net


Net = module_of()


def trainer_of(strategy: Any, library: Any = pl, **options: Any) -> Any:
    """On the CPU, without logs or checkpoints, if ``options`` do not say so."""
    chosen = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 2, "num_sanity_val_steps": 0}
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    warnings.filterwarnings("ignore")  # of Lightning's own, about loaders and their workers; this is a rank's process
    return library.Trainer(**chosen | dict.fromkeys(quiet, False) | options)
