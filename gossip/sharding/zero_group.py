"""Ranks that each have the whole module, and divide its gradients, optimizer state, updates and messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gossip.communication.world import World
from gossip.parameters.buckets import Bucket, check_parameters
from gossip.private_torch import fsdp_modules
from gossip.sharding.local_group import Steps
from gossip.sharding.partitioned_group import PartitionedGroup
from gossip.sharding.zero_shards import GradientDivision, RowGathering, ZeroShards


class ZeroGroup(PartitionedGroup):
    """A group whose ranks each update and exchange some rows of every parameter, and gather them after each step.

    Gradients are averaged over the group by a reduce-scatter of each bucket, and rows are gathered by an all-gather;
    both run beside the backward pass. Between steps the module's parameters are whole, current and ordinary tensors;
    with algorithms that combine before the next forward pass, reading them through the model is collective.

    Parameters
    ----------
    module : Module
        Not sharded.
    world : World
        The ranks of the group.
    """

    replica: ZeroShards

    def __init__(self, module: nn.Module, world: World) -> None:
        if fsdp_modules(module):
            raise ValueError(
                'shard="optimizer" divides a module that is not sharded, but fully_shard was applied to it; leave out '
                "one of them"
            )
        check_parameters(module)
        super().__init__(module, ZeroShards(module, world), world)
        self._division: GradientDivision | None = None
        self._gathering: RowGathering | None = None
        self._on_state_dict: Any = None

    def start_equal_(self) -> None:
        super().start_equal_()
        self.replica.pull()

    def attach(self, buckets: Iterable[Bucket], steps: Steps) -> None:
        buckets = list(buckets)
        self._on_state_dict = self.module.register_state_dict_pre_hook(lambda *_: steps.combine_if_due())
        self._division = GradientDivision(self.replica, buckets, self.world, self.rows, steps)
        self._gathering = RowGathering(self.replica, buckets, self.world, self.rows)
        self._gathering.gather()

    def take_edits(self) -> None:
        self.replica.pull()

    def before_forward(self, step: int) -> None:
        del step
        self.replica.check()

    def complete_gradients(self, where: str, *, is_idle: bool = False) -> None:
        if self._division is not None:
            self._division.complete(where, is_idle=is_idle)

    def drop_gradients(self) -> bool:
        return self._division is None or self._division.drop()

    def updated(self, index: int) -> None:
        if self._gathering is not None:
            self._gathering.begin(index)

    def finish_step(self) -> None:
        if self._gathering is not None:
            self._gathering.finish()

    def changed(self) -> None:
        if self._gathering is not None:
            self._gathering.gather()

    def unreduced(self) -> dict[str, torch.Tensor]:
        return self.replica.unreduced()

    def restore_unreduced(self, gradients: Mapping[str, torch.Tensor]) -> None:
        self.replica.restore_unreduced(gradients)

    def lengths(self) -> Mapping[str, tuple[int, int]]:
        return self.replica.lengths()

    def close(self) -> None:
        if self._on_state_dict is not None:
            self._on_state_dict.remove()
        if self._division is not None:
            self._division.close()
        super().close()
