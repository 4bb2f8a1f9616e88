"""Protection of a model against wrapping by another kind of data parallelism."""

from typing import NoReturn

from torch import nn

from gossip.errors import GossipError
from gossip.private_torch import active_ddp, is_sharded

_REMEDY = (
    "Call the model itself. Libraries that wrap models take the bare module: with accelerate, use "
    "gossip.integrations.accelerate.prepare(accelerator, module, ...) instead of accelerator.prepare(...); with "
    'transformers, gossip.integrations.transformers.GossipTrainer; with Lightning, Trainer(strategy="gossip") after '
    "import gossip.integrations.lightning"
)


class Outermost(nn.Module):
    """A model that refuses to run inside DistributedDataParallel, FullyShardedDataParallel and DataParallel.

    They would train the same parameters in their own way at the same time, without an error.
    """

    module: nn.Module

    def check_outermost(self, *, is_sharded_inside: bool = False) -> None:
        """Raise if this forward pass belongs to another wrapper. Local.

        Raises GossipError: it does; the text says what to do, also with libraries that wrap models.
        """
        outer = active_ddp()
        if outer is not None and any(part is self for part in outer.modules()):
            self._refuse("a DistributedDataParallel, which all-reduces the gradients that are exchanged here by gossip")
        if is_sharded(self) or (is_sharded(self.module) and not is_sharded_inside):
            self._refuse("FullyShardedDataParallel or fully_shard, which leave each rank only a part of each parameter")

    def _replicate_for_data_parallel(self) -> NoReturn:
        self._refuse("a torch.nn.DataParallel, which runs copies on several devices: start one process per device")

    def _refuse(self, by: str) -> NoReturn:
        raise GossipError(f"this {type(self).__name__} is wrapped by {by}. {_REMEDY}")
