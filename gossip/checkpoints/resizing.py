"""The state of n ranks combined into one from which any other number of ranks can start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gossip.errors import CheckpointError, reason
from gossip.parameters.buckets import is_mixable
from gossip.parameters.buffers import is_averaged
from gossip.step.state.algorithm_state import for_new_world, weight_of

_Path = tuple[Any, ...]


def mean_state(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of the old ranks' states. Local; holds one of them in memory at a time, besides the sum.

    Parameters, float buffers and the optimizers' float tensors are averaged in float32 or wider, each over the ranks
    that have it. Integers, step counters, parameter groups and parts are those of the old rank 0. Gradients, messages
    in flight and the states of random number generators belong to single ranks, and are left out.

    Raises CheckpointError: the states do not match each other.
    """
    mean = _Mean()
    for rank, state in enumerate(states):
        try:
            mean.add(state)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the state of rank {rank} does not match rank 0's: {reason(error)}") from error
    return mean.result()


class _Mean:
    def __init__(self) -> None:
        self._first: dict[str, Any] = {}
        self._sums: dict[_Path, torch.Tensor] = {}
        self._counts: dict[_Path, int] = {}

    def add(self, state: dict[str, Any]) -> None:
        algorithm = state["engine"].get("algorithm")
        weight = None if algorithm is None else weight_of(algorithm)
        if weight is not None:
            parameters = state["parameters"]
            weighted = {name: x * weight.to(x.dtype) for name, x in parameters.items() if is_mixable(x)}
            state = state | {"parameters": parameters | weighted}
        _map_floats(self._averaged(state), (), self._accumulate)
        if not self._first:
            engine = {key: state["engine"][key] for key in ("step", "algorithm") if key in state["engine"]}
            self._first = state | {"gradients": {}, "unreduced": {}, "rng": None, "engine": engine}
            return
        for kept, added in zip(self._first["optimizers"], state["optimizers"], strict=True):
            for number, entry in added["state"].items():
                kept["state"].setdefault(number, entry)

    def result(self) -> dict[str, Any]:
        averages: dict[str, Any] = _map_floats(self._averaged(self._first), (), self._average)
        kept = averages.pop("kept")
        engine = self._first["engine"]
        if "algorithm" in engine:
            engine = engine | {"algorithm": for_new_world(engine["algorithm"], kept)}
        return self._first | averages | {"engine": engine}

    @staticmethod
    def _averaged(state: dict[str, Any]) -> dict[str, Any]:
        sections = {section: state[section] for section in ("parameters", "buffers", "optimizers")}
        return sections | {"kept": state["engine"].get("algorithm", {}).get("kept", {})}

    def _accumulate(self, path: _Path, tensor: torch.Tensor) -> torch.Tensor:
        if path in self._sums:
            if self._sums[path].shape != tensor.shape:
                raise TypeError(f"shape {list(tensor.shape)} differs from {list(self._sums[path].shape)} at {path}")
            self._sums[path].add_(tensor)
        else:
            self._sums[path] = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        self._counts[path] = self._counts.get(path, 0) + 1
        return tensor

    def _average(self, path: _Path, tensor: torch.Tensor) -> torch.Tensor:
        return self._sums[path].div_(self._counts[path]).to(tensor.dtype)


def _map_floats(tree: Any, path: _Path, function: Callable[[_Path, torch.Tensor], torch.Tensor]) -> Any:
    """Return ``tree`` with ``function`` applied to the tensors that are averaged."""
    if isinstance(tree, torch.Tensor):
        is_counter = path[0] == "optimizers" and path[-1] == "step"
        has_mean = is_mixable(tree) if path[0] == "parameters" else is_averaged(tree)
        return function(path, tree) if has_mean and not is_counter else tree
    if isinstance(tree, dict):
        kept = {"param_groups"} if path[:1] == ("optimizers",) and len(path) == 2 else set()
        return {
            key: branch if key in kept else _map_floats(branch, (*path, key), function) for key, branch in tree.items()
        }
    if isinstance(tree, list | tuple):
        return type(tree)(_map_floats(branch, (*path, index), function) for index, branch in enumerate(tree))
    return tree
