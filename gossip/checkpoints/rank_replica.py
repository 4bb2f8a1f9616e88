"""The replica of one rank, held by one process of a distributed run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gossip.checkpoints.model_description import (
    describe_buckets,
    describe_module,
    describe_optimizers,
    exported_tensors,
)
from gossip.checkpoints.random_states import rng_states
from gossip.checkpoints.rank_averages import Mean, means_over_ranks
from gossip.checkpoints.replicas import Replicas
from gossip.optimizers.schedule_free import check_evaluated
from gossip.parameters.extra_state import extra_states
from gossip.parameters.manifest import describe_topology
from gossip.parameters.names import named_parameters
from gossip.sharding.resharding import reshard
from gossip.step.collective_operations import settle
from gossip.step.state.replica_state import module_state, optimizer_state, restore_replica
from gossip.wrapper import GossipDataParallel


class RankReplica(Replicas):
    """The replica of a model and its optimizers."""

    def __init__(self, model: GossipDataParallel) -> None:
        self._model = model
        self.kept = model._kept
        self._engine = model._live()
        self._world = world = model._world  # the ranks that take part: one that has just joined may not
        self.ranks = range(world.rank, world.rank + 1)
        self.world_size = self.num_processes = world.world_size
        self.process = world.rank

    @functools.cached_property
    def step(self) -> int:
        """The number of steps made; with an asynchronous algorithm, that of the rank that has made the most."""
        if not self._model.algorithm.is_asynchronous:
            return self._model.step
        return max(map(int, self.gather(str(self._model.step).encode(), "comparing numbers of steps")))

    @property
    def _optimizers(self) -> list[Optimizer]:
        optimizer: Any = self._model.optimizer
        if optimizer is None:
            return []
        return list(optimizer) if isinstance(optimizer, tuple | list) else [optimizer]

    def gather(self, payload: bytes, what: str) -> list[bytes]:
        with self._engine.fatal():
            return self._world.gather_bytes(payload, what)

    def check_between_steps(self) -> None:
        self._engine.check_between_steps()

    def check_alive(self) -> None:
        self._engine.check_alive()

    def describe(self) -> dict[str, Any]:
        groups = [
            (type(optimizer).__name__, [group["params"] for group in optimizer.param_groups])
            for optimizer in self._optimizers
        ]
        return {
            "module": describe_module(self._model.module),
            "optimizers": describe_optimizers(groups, named_parameters(self._engine.module)),
            "buckets": describe_buckets(self._engine.buckets),
            "unfrozen": [list(names) for names in self._engine.unfrozen],
            "topology": describe_topology(self._model.topology),
            "compression": self._model.compression.describe(),
        }

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
        }

    def _lengths(self) -> Mapping[str, tuple[int, int]]:
        """By a divided parameter's name the dimension along which it is, and its length there."""
        return {}

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in named_parameters(self._engine.module)}
        of_optimizers = [
            [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in self._optimizers
        ]
        shapes = {name: parameter.shape for name, parameter in named_parameters(self._model.module)}
        return reshard(states, shapes, self._lengths(), of_optimizers, self.place, self.num_shards)

    def unfreeze(self, names: Sequence[str]) -> None:
        self._engine.unfreeze(names)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        (state,) = states
        return restore_replica(self._engine, self._optimizers, state)

    def exported(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to("meta") for name, tensor in exported_tensors(self._engine.module)}

    def averages(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return ((mean.name, mean.assemble(is_kept=self.process == 0)) for mean in self._means())

    def _means(self) -> Iterator[Mean]:
        check_evaluated(self._optimizers, "export()")
        settle(self._engine, self._world)
        return means_over_ranks(self, self._engine, self._world)
