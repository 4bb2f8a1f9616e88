"""The part that the strategies for Lightning's Trainer and for Fabric have in common."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from loguru import logger
from torch import nn
from torch.optim import Optimizer

import gossip
from gossip import GossipDataParallel
from gossip.integrations.common_checks import check_options, steps_in_backward, weakly, wrap
from gossip.integrations.remaining_ranks import RemainingRanks, remaining_ranks
from gossip.private_torch import SUPPORTS_SCALING
from topologies import Topology

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object

KEY = "gossip_replicas"
"""The key under which a Lightning checkpoint names its replicas in the folder next to it."""

_OF_DDP = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "process_group_backend"}
_TAKEN = {
    "module": "train the module that the Trainer or Fabric sets up",
    "optimizer": "return it from configure_optimizers(), or pass it to fabric.setup()",
    "scaler": 'pass precision="16-mixed" to the Trainer or Fabric, whose scaler is used',
}


class BaseStrategy(_DDPStrategy):
    """A mixin that precedes a DDPStrategy among the bases of a class."""

    precision_argument: ClassVar[str]
    """What the DDPStrategy calls its precision plugin."""

    def __init__(self, topology: str | Topology = "one_peer_exponential", **options: Any) -> None:
        names = {*_OF_DDP, "start_method", self.precision_argument}
        of_ddp = {name: options.pop(name) for name in names if name in options}
        check_options(type(self).__name__, options, _TAKEN)
        if "timeout" in options:
            of_ddp["timeout"] = options["timeout"]
        super().__init__(**of_ddp)
        self._options = {"topology": topology, **options}
        self._remaining: RemainingRanks | None = None  # of those that may be lost

    # ------------------------------------------------------------------ who there is

    def setup_environment(self) -> None:
        """Set up the process group as DDP does; what is done with it is done by the remaining ranks. Collective."""
        super().setup_environment()
        if self._remaining is None:
            self._remaining = remaining_ranks(self, self._options, weakly(self._on_change))

    def _on_change(self, rank: int, world_size: int) -> None:  # noqa: ARG002
        """React to the loss of ranks."""
        rank_zero_only.rank = rank  # type: ignore[attr-defined]  # as Lightning sets it

    @property
    def global_rank(self) -> int:
        """The number of this rank among those that remain."""
        return super().global_rank if self._remaining is None else self._remaining.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that remain."""
        return super().world_size if self._remaining is None else self._remaining.world_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How new loaders are divided."""
        divided: dict[str, Any] = super().distributed_sampler_kwargs
        return divided if self._remaining is None else {"num_replicas": self.world_size, "rank": self.global_rank}

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all remaining ranks, or any, decide so. Collective."""
        if self._remaining is None:
            return bool(super().reduce_boolean_decision(decision, all))
        found: list[torch.Tensor] = []
        self._remaining.all_gather(found, torch.tensor(bool(decision)))
        decisions = [bool(each) for each in found]
        return min(decisions) if all else max(decisions)

    # ------------------------------------------------------------------ steps

    @property
    def _steps_in_backward(self) -> bool:
        return steps_in_backward(self._options)

    @property
    def _scaler(self) -> Any:
        return getattr(getattr(self, self.precision_argument), "scaler", None)

    def _wrap(self, module: nn.Module, optimizers: Sequence[Optimizer], **more: Any) -> GossipDataParallel:
        options = self._options | more
        return wrap(module, tuple(optimizers) or None, self._remaining, scaler=self._scaler, **options)

    def _step_scaled(self, model: GossipDataParallel, optimizer: Optimizer, **kwargs: Any) -> None:
        """Let the scaler step one of the model's optimizers, and update the scaler once per step of the model."""
        step = model.step
        self._scaler.step(optimizer, **kwargs)
        if model.step > step:
            self._scaler.update()

    # ------------------------------------------------------------------ checkpoints

    def _keep_only(self, folder: Path, name: str) -> None:
        """Remove the replicas of earlier checkpoints of the same name, once the newest is complete."""
        if self.is_global_zero:
            for path in folder.glob("step_*"):
                if path.name != name:
                    shutil.rmtree(path, ignore_errors=True)

    def _load_replicas(self, model: GossipDataParallel, folder: Path, **parts: Any) -> bool:
        """Restore every rank's replica; return False, with a warning, where there is none. Collective."""
        is_there: bool = self.broadcast(folder.is_dir())
        if is_there:
            gossip.load(model, folder, **parts)
        elif self.is_global_zero:
            logger.warning(
                "{}, the replicas of the checkpoint, does not exist: all ranks start from their average, with the "
                "optimizers of rank 0",
                folder,
            )
        return is_there


def folder_beside(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the replicas that belong to the checkpoint at ``path``, which may be a link. Local."""
    if "://" in os.fspath(path):
        raise ValueError(
            "the replicas of all ranks are saved next to the checkpoint, in a folder that all ranks share, got "
            f"{path}; save to a path in the file system, or only the weights (save_weights_only=True)"
        )
    return Path(f"{os.path.realpath(path)}.gossip")


@contextlib.contextmanager
def unscaled_by_owner(optimizer: Optimizer) -> Iterator[None]:
    """Keep the optimizer within the block from claiming that its ``step()`` divides by the scale. Local.

    An optimizer that belongs to a model makes this claim so that a GradScaler steps it even after an overflow;
    Lightning refuses to clip the gradients of an optimizer that makes it.
    """
    claimed = getattr(optimizer, SUPPORTS_SCALING, False)
    setattr(optimizer, SUPPORTS_SCALING, False)
    try:
        yield
    finally:
        setattr(optimizer, SUPPORTS_SCALING, claimed)
