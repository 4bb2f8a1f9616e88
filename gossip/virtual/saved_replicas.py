"""Saving and restoring virtual workers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch.optim import Optimizer

from gossip.checkpoints.random_states import restore_rng_states, rng_states
from gossip.compression.codec import Compression
from gossip.step.algorithm_state import algorithm_state, load_algorithm_state
from gossip.virtual.frozen_stacks import FrozenStacks
from gossip.virtual.replica_state import (
    check_fits,
    for_other_world_size,
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
    read_state,
    write_state,
)
from gossip.virtual.shards import Shard, written
from gossip.virtual.stacked_exchanges import StackedExchanges
from gossip.virtual.stacked_updating import StackedUpdater


class SavesReplicas:
    """What :class:`gossip.VirtualWorkers` saves of itself, and takes back."""

    world_size: int
    step: int
    compression: Compression
    _shards: tuple[Shard, ...]
    _optimizers: Sequence[Optimizer]
    _updater: StackedUpdater
    _exchanges: StackedExchanges
    _frozen: FrozenStacks

    def _unfreeze(self, names: Sequence[str]) -> None:
        buckets = self._frozen.release(names)
        self._updater.add(buckets)
        self._exchanges.add(buckets)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """All that the training needs to go on bit for bit: copies, on the CPU, as plain data and tensors [n, ...].

        Parameters, buffers and accumulated gradients by the bare module's names, optimizers, what is in flight, what
        codecs remember, and the random numbers of torch, Python and NumPy.
        """
        self._updater.stack_new_groups()
        return {
            "world_size": self.world_size,
            "step": self.step,
            "num_bad_steps": self._updater.num_bad_steps.clone(),
            "scales": self._updater.scales.clone(),
            "compression": self.compression.describe(),
            "unfrozen": [list(names) for names in self._frozen.released],
            **module_state(self._shards),
            "optimizers": [
                copy.deepcopy(optimizer_state(optimizer, len(self._shards))) for optimizer in self._optimizers
            ],
            **self._exchanges.state_dict(),
            "algorithm": algorithm_state(self._exchanges),
            "rng": rng_states(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, on whatever devices; with another number of replicas from the mean of those saved.

        Then, or with another compression or other buckets, what was in flight is left out, which a warning says.

        Raises
        ------
        ValueError
            It is a state of another model.
        """
        self._updater.stack_new_groups()
        check_fits(state, self._shards, self._optimizers)
        algorithm = state.get("algorithm")
        if algorithm is not None and state["world_size"] != self.world_size:
            state, algorithm = for_other_world_size(state, algorithm, self.world_size)
        load_module_state(state, self._shards)
        self._updater.drop_gradients()
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            load_optimizer_state(optimizer, copy.deepcopy(saved), len(self._shards), self.world_size)
        for names in state.get("unfrozen", ()):
            self._unfreeze(names)
        self.step = state["step"]
        self._exchanges.load_state_dict(None)
        left_out = restore_rng_states(state["rng"]) + load_algorithm_state(self._exchanges, algorithm)
        if state["world_size"] == self.world_size:
            for name, values in state["gradients"].items():
                for shard in self._shards:
                    own = values[shard.ranks.start : shard.ranks.stop]
                    shard.parameters[name].grad = own.to(shard.device, copy=True)
            self._updater.scales = state["scales"].clone()
            self._updater.num_bad_steps = state["num_bad_steps"].clone()
            if state["compression"] == self.compression.describe() and self._exchanges.fits(state):
                self._exchanges.load_state_dict(state)
            else:
                left_out.append("what was in flight: the compression or the buckets are others")
        else:
            self._updater.num_bad_steps.zero_()
            left_out.append(
                f"the replicas: {state['world_size']} were saved, all {self.world_size} start from their mean"
            )
        if left_out:
            logger.warning("step {} is restored, but not {}", self.step, "; ".join(left_out))
        written(self._shards)

    def save(self, path: str | Path) -> None:
        """Write :meth:`state_dict` into one file, hashed and by one rename: it is whole, or the old one stays.

        Raises
        ------
        CheckpointError
            It cannot be written.
        """
        write_state(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Read what :meth:`save` wrote, and :meth:`load_state_dict`.

        Raises
        ------
        CheckpointError
            The file is missing, damaged, or something else.
        ValueError
            It is of another model.
        """
        self.load_state_dict(read_state(Path(path)))
