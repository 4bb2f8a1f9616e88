"""The replica of one rank, or the shard of it that a rank of a group holds, in one process of a distributed run."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gossip.checkpoints.model_description import describe_model, describe_module, describe_optimizers, exported_tensors
from gossip.checkpoints.random_states import rng_states
from gossip.checkpoints.rank_averages import Mean, gather_shards, means_over_ranks
from gossip.checkpoints.replicas import Replicas
from gossip.checkpoints.resizing import reshard
from gossip.optimizers.schedule_free import check_evaluated
from gossip.parameters.buffers import persistent_buffers
from gossip.parameters.extra_state import extra_states
from gossip.parameters.names import named_parameters
from gossip.parameters.serializable_state import compact
from gossip.sharding.local_group import PartitionedGroup
from gossip.sharding.shard_mesh import Division
from gossip.step.collective_operations import settle
from gossip.step.state.replica_state import module_state, optimizer_state, restore_replica
from gossip.wrapper import GossipDataParallel


class RankReplica(Replicas):
    """That of a model and its optimizers; with ``mesh=`` the ranks are all ranks of all groups, group by group."""

    def __init__(self, model: GossipDataParallel) -> None:
        self._model = model
        self.kept = model._kept
        self._engine = model._live()
        self._engine.check_alive()
        self._optimizers = self._engine.updater.optimizers
        self._world = world = model._world  # the ranks that take part: one that has just joined may not
        self.timeout = world.timeout
        self._group = group = self._engine.group
        self.num_shards, self.place, self.group_size = group.num_shards, group.place, group.size
        self.process = world.rank * group.size + group.rank
        self.ranks = range(self.process, self.process + 1)
        self.world_size = self.num_processes = world.world_size * group.size

    @functools.cached_property
    def step(self) -> int:
        """The number of steps made; with an asynchronous algorithm, that of the rank that has made the most."""
        if not self._model.algorithm.is_asynchronous:
            return self._model.step
        return max(map(int, self.gather(self._model.step, "comparing numbers of steps")))

    def gather(self, content: Any, what: str) -> list[Any]:
        with self._engine.fatal():
            everyone = self._world.gather_json(self._group.gather_json(content, what), what)
        return [each for of_group in everyone for each in of_group]

    def check_between_steps(self) -> None:
        self._engine.check_between_steps()

    def describe(self) -> dict[str, Any]:
        groups = [
            (type(optimizer).__name__, [group["params"] for group in optimizer.param_groups])
            for optimizer in self._optimizers
        ]
        engine = self._engine
        uneven = {name: each for name, each in self._divisions().items() if not each.is_even}
        shard = {"shard": describe_module(engine.module, uneven)} if self._group.is_shared else {}
        optimizers = describe_optimizers(groups, named_parameters(engine.module))
        return describe_model(self._model, optimizers, engine.buckets, engine.unfrozen, uneven) | shard

    @functools.cached_property
    def _optimizer_states(self) -> list[dict[str, Any]]:
        named = list(named_parameters(self._engine.module))
        return [optimizer_state(optimizer, named) for optimizer in self._optimizers]

    def check_savable(self) -> None:
        _ = self._optimizer_states
        extra_states(self._model.module)

    def settle(self) -> None:
        self._engine.frozen.compare()
        settle(self._engine, self._world)
        with self._engine.fatal():
            self._engine.exchanges.arrive()  # copying it, which may fail, is no exchange

    def states(self) -> Iterator[dict[str, Any]]:
        scaler = self._engine.updater.scaler
        yield {
            **module_state(self._engine),
            "optimizers": self._optimizer_states,
            "scaler": None if scaler is None else scaler.scaler.state_dict(),
            "engine": self._engine.state_dict(),
            "rng": rng_states(),
            "unreduced": {name: compact(gradient, name) for name, gradient in self._group.unreduced().items()},
        }

    def _divisions(self) -> Mapping[str, Division]:
        return self._group.divisions if self.num_shards > 1 else {}

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in named_parameters(self._engine.module)}
        of_optimizers = [
            [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in self._optimizers
        ]
        shapes = {name: parameter.shape for name, parameter in named_parameters(self._model.module)}
        return reshard(states, shapes, self._divisions(), of_optimizers, self.place)

    def unfreeze(self, names: Sequence[str]) -> None:
        self._engine.unfreeze(names)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        (state,) = states
        left_out = restore_replica(self._engine, self._optimizers, state)
        self._group.restore_unreduced(state.get("unreduced", {}))
        self._group.changed()
        return left_out

    def exported(self) -> dict[str, torch.Tensor]:
        divisions = self._divisions()
        tensors = {name: tensor.to("meta") for name, tensor in exported_tensors(self._engine.module)}
        return {
            name: tensor.new_empty(divisions[name].whole_shape(tensor.shape)) if name in divisions else tensor
            for name, tensor in tensors.items()
        }

    def averages(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Rank 0 holds the result; the others a chunk of their shard, and of all shards a chunk altogether."""
        check_evaluated(self._optimizers, "export()")
        settle(self._engine, self._world)
        divisions = self._divisions()
        means = means_over_ranks(self, self._engine, self._world, divisions)
        return ((mean.name, self._whole(mean, divisions.get(mean.name))) for mean in means)

    def _whole(self, mean: Mean, division: Division | None) -> torch.Tensor | None:
        """Return the mean of a tensor, whole, on rank 0.

        The ranks of the first group have the means of all shards together, and buffers of their own.
        """
        is_first, is_buffer = self.process == 0, mean.name in dict(persistent_buffers(self._engine.module))
        if self._world.rank or not (self._group.is_shared and (division or is_buffer)):
            return mean.assemble(is_kept=is_first)
        with self._engine.fatal():
            if division is not None:
                assert isinstance(self._group, PartitionedGroup)
                return gather_shards(mean, division, self._group)
            tensor = mean.assemble(is_kept=True)
            assert tensor is not None
            self._group.average_(mean.name, tensor)
        return tensor if is_first else None
