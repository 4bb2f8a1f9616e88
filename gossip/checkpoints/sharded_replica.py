"""The shard of a replica that a rank of a shard group holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gossip.checkpoints.checkpoint_layout import describe_module
from gossip.checkpoints.rank_replica import RankReplica
from gossip.parameters.buffers import is_averaged
from gossip.wrapper import GossipDataParallel


class ShardedReplica(RankReplica):
    """That of a model with ``mesh=``: the ranks of a checkpoint are all ranks of all groups, group by group.

    Parameters
    ----------
    model : GossipDataParallel
    """

    def __init__(self, model: GossipDataParallel) -> None:
        super().__init__(model)
        shards = self._engine.shards
        assert shards is not None
        self._shards = shards
        self.num_shards, self.place = shards.world.world_size, shards.world.rank
        self.process = model.rank * self.num_shards + self.place
        self.ranks = range(self.process, self.process + 1)
        self.world_size = self.num_processes = model.world_size * self.num_shards

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        with self._engine.fatal():
            group = self._shards.world.gather_bytes(payload, what)
            joined = json.dumps([each.hex() for each in group]).encode()
            everyone = self._world.gather_bytes(joined, what)
        return [bytes.fromhex(each) for of_group in everyone for each in json.loads(of_group)]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "shard": describe_module(self._engine.module)}

    def averages(self, path: Path) -> dict[str, torch.Tensor]:
        """Rank 0 holds the result; the others a shard of it, and the whole of one chunk at a time."""
        shards = super().averages(path)
        if self._model.rank:
            return {}
        lengths = self._lengths()
        whole: dict[str, torch.Tensor] = {}
        with self._engine.fatal():
            for name, tensor in shards.items():
                if name in lengths:
                    gathered = self._shards.gather(tensor, *lengths[name], f"gathering {name!r}")
                elif is_averaged(tensor):
                    gathered = tensor.clone()
                    self._shards.world.average_(gathered, f"averaging buffer {name!r} over the shard group")
                else:
                    gathered = tensor
                if self.process == 0 and gathered is not None:
                    whole[name] = gathered
        return whole

    def _lengths(self) -> Mapping[str, tuple[int, int]]:
        return self._shards.replica.lengths()
