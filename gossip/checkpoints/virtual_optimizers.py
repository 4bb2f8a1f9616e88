"""Conversion between an optimizer over stacked parameters and the optimizers of single ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gossip.parameters.serializable_state import to_serializable
from gossip.step.state.replica_state import optimizer_state
from gossip.virtual.shards import Shard
from gossip.virtual.stacked_optimizers import IMPLEMENTATION, elementwise_keys, has_shape

_OF_STACKS = ("params", "param_names")  # the entries of a group that depend on the number of devices


class StackedOptimizer:
    """One optimizer of virtual workers, as checkpoints see it.

    Parameters
    ----------
    optimizer : Optimizer
        An optimizer over stacks, [k, *shape]; the stacks of one parameter are consecutive.
    """

    def __init__(self, optimizer: Optimizer, shards: Sequence[Shard]) -> None:
        self._optimizer = optimizer
        self._shards = shards
        self._num_shards = len(shards)

    @property
    def groups(self) -> list[list[torch.Tensor]]:
        """The stacks of the first shard, by group."""
        return [list(group["params"][:: self._num_shards]) for group in self._optimizer.param_groups]

    def _held(self) -> list[list[torch.Tensor]]:
        """Return the stacks of each parameter, in the order of the groups."""
        stacks = [stack for group in self._optimizer.param_groups for stack in group["params"]]
        return [stacks[start : start + self._num_shards] for start in range(0, len(stacks), self._num_shards)]

    def check_savable(self) -> None:
        """Raise TypeError if the state holds something that cannot be saved."""
        optimizer_state(self._optimizer, (named for shard in self._shards for named in shard.parameters.items()))

    def state_of(self, shard: int, row: int) -> dict[str, Any]:
        """Return what ``state_dict()`` of a single rank's own optimizer would return."""
        state: dict[int, dict[str, Any]] = {}
        for number, stacks in enumerate(self._held()):
            stack = stacks[shard]
            if stack in self._optimizer.state:
                entry = self._optimizer.state[stack]
                state[number] = {
                    key: value[row] if has_shape(value, stack) else copy.deepcopy(value) for key, value in entry.items()
                }
        groups, first = [], 0
        for group in self._optimizer.param_groups:
            saved = {key: value for key, value in group.items() if key not in _OF_STACKS}
            stop = first + len(group["params"]) // self._num_shards
            if "param_names" in group:
                saved["param_names"] = group["param_names"][:: self._num_shards]
            groups.append(saved | {"params": list(range(first, stop))})
            first = stop
        saved_state = {"state": state, "param_groups": groups}
        checked: dict[str, Any] = to_serializable(saved_state, f"the state of {type(self._optimizer).__name__}")
        return checked

    def load(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        """Load the states of single ranks, and return in words what could not be restored."""
        optimizer = self._optimizer
        optimizer.state.clear()
        held = self._held()
        entries = [[state["state"].get(number) for state in states] for number in range(len(held))]
        known: list[Mapping[str, Any]] = [
            next((entry for entry in of_ranks if entry is not None), {}) for of_ranks in entries
        ]
        stacked = elementwise_keys((stacks[0][0], entry) for stacks, entry in zip(held, known, strict=True))
        differing: dict[str, None] = {}
        for stacks, of_ranks, first in zip(held, entries, known, strict=True):
            for key, value in first.items():
                if key in stacked:
                    rows = [torch.zeros_like(value) if entry is None else entry[key] for entry in of_ranks]
                    for shard, stack in zip(self._shards, stacks, strict=True):
                        own = torch.stack(rows[shard.ranks.start : shard.ranks.stop])
                        optimizer.state[stack][key] = own.to(stack.device)
                    continue
                for stack in stacks:
                    optimizer.state[stack][key] = copy.deepcopy(value)
                if not _all_equal(entry[key] for entry in of_ranks if entry is not None):
                    differing[key] = None
        for group, saved in zip(optimizer.param_groups, states[0]["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in (*_OF_STACKS, *IMPLEMENTATION)})
        name = type(optimizer).__name__
        return [f"{key!r} of {name}, which differed between ranks and is now rank 0's" for key in differing]


def _all_equal(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(torch.equal(first, value) if isinstance(first, torch.Tensor) else first == value for value in others)
