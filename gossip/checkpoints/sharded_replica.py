"""The shard of a replica that a rank of a shard group holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gossip.checkpoints.model_description import describe_module
from gossip.checkpoints.rank_averages import Mean
from gossip.checkpoints.rank_replica import RankReplica
from gossip.checkpoints.shard_gathering import gather_shards, whole_shape
from gossip.parameters.buffers import is_averaged, persistent_buffers
from gossip.parameters.serializable_state import compact
from gossip.wrapper import GossipDataParallel


class ShardedReplica(RankReplica):
    """That of a model with ``mesh=``: the ranks of a checkpoint are all ranks of all groups, group by group."""

    def __init__(self, model: GossipDataParallel) -> None:
        super().__init__(model)
        shards = self._engine.shards
        assert shards is not None
        self._shards = shards
        self.num_shards, self.place = shards.num_shards, shards.place
        self.group_size = shards.world.world_size
        self.process = self._world.rank * self.group_size + shards.world.rank
        self.ranks = range(self.process, self.process + 1)
        self.world_size = self.num_processes = self._world.world_size * self.group_size

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        with self._engine.fatal():
            group = self._shards.world.gather_bytes(payload, what)
            joined = json.dumps([each.hex() for each in group]).encode()
            everyone = self._world.gather_bytes(joined, what)
        return [bytes.fromhex(each) for of_group in everyone for each in json.loads(of_group)]

    def states(self) -> Iterator[dict[str, Any]]:
        unreduced = {name: compact(gradient, name) for name, gradient in self._shards.unreduced().items()}
        for state in super().states():
            yield {**state, "unreduced": unreduced}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        left_out = super().restore(states)
        self._shards.restore_unreduced(states[0].get("unreduced", {}))
        self._shards.changed()
        return left_out

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "shard": describe_module(self._engine.module)}

    def exported(self) -> dict[str, torch.Tensor]:
        lengths = self._lengths()
        return {
            name: tensor.new_empty(whole_shape(tensor.shape, *lengths[name])) if name in lengths else tensor
            for name, tensor in super().exported().items()
        }

    def averages(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Rank 0 holds the result; the others a chunk of their shard, and of all shards a chunk altogether."""
        means = self._means()
        lengths = self._lengths()
        return ((mean.name, self._whole(mean, lengths.get(mean.name))) for mean in means)

    def _whole(self, mean: Mean, divided: tuple[int, int] | None) -> torch.Tensor | None:
        """Return the mean of a tensor, whole, on rank 0; ``divided`` says along which dimension it is, and its length.

        The ranks of the first group have the means of all shards together, and buffers of their own.
        """
        is_first = self.process == 0
        if self._world.rank or (divided is None and mean.name not in dict(persistent_buffers(self._engine.module))):
            return mean.assemble(is_kept=is_first)
        with self._engine.fatal():
            if divided is not None:
                return gather_shards(mean, *divided, self._shards)
            tensor = mean.assemble(is_kept=True)
            assert tensor is not None
            if is_averaged(tensor):
                values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                self._shards.world.average_(values, f"averaging buffer {mean.name!r} over the group")
        return tensor if is_first else None

    def _lengths(self) -> Mapping[str, tuple[int, int]]:
        return self._shards.lengths() if self.num_shards > 1 else {}
