"""The state of n ranks combined into one from which any other number can start; that of shards, for another number."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gossip.errors import CheckpointError, reason
from gossip.parameters.buckets import is_mixable
from gossip.parameters.buffers import is_averaged
from gossip.sharding.shard_mesh import chunk_length
from gossip.step.state.algorithm_state import for_new_world, weight_of

_Path = tuple[Any, ...]


def mean_state(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of the old ranks' states. Local; holds one of them in memory at a time, besides the sum.

    Parameters, float buffers and the optimizers' float tensors are averaged in float32 or wider, each over the ranks
    that have it. Integers, step counters, parameter groups and parts are those of the old rank 0. Gradients, messages
    in flight and the states of random number generators belong to single ranks, and are left out.

    Raises CheckpointError: the states do not match each other.
    """
    first: dict[str, Any] = {}
    sums: dict[_Path, torch.Tensor] = {}
    counts = Counter[_Path]()
    weights: list[torch.Tensor] = []

    def accumulate(path: _Path, tensor: torch.Tensor) -> torch.Tensor:
        counts[path] += 1
        if path not in sums:
            sums[path] = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        elif sums[path].shape == tensor.shape:
            sums[path].add_(tensor)
        else:
            raise TypeError(f"shape {list(tensor.shape)} differs from {list(sums[path].shape)} at {path}")
        return tensor

    for rank, state in enumerate(states):
        try:
            _map_floats(_averaged(state), (), accumulate)
            weights += [weight] if (weight := _weight(state)) is not None else []
            if not first:
                engine = {key: state["engine"][key] for key in ("step", "algorithm") if key in state["engine"]}
                first = state | {"gradients": {}, "unreduced": {}, "rng": None, "engine": engine}
                continue
            for kept, added in zip(first["optimizers"], state["optimizers"], strict=True):
                for number, entry in added["state"].items():
                    kept["state"].setdefault(number, entry)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"the state of rank {rank} does not match rank 0's: {reason(error)}") from error
    mean_weight = float(torch.stack(weights).mean()) if weights else 1.0

    def mean(path: _Path, tensor: torch.Tensor) -> torch.Tensor:
        if path[0] != "parameters":
            return sums[path].div_(counts[path]).to(tensor.dtype)
        return sums[path].div_(counts[path] * mean_weight).to(first["parameters"][path[1]].dtype)

    averages: dict[str, Any] = _map_floats(_averaged(first), (), mean)
    kept, engine = averages.pop("kept"), first["engine"]
    if "algorithm" in engine:
        engine = engine | {"algorithm": for_new_world(engine["algorithm"], kept)}
    return first | averages | {"engine": engine}


def _weight(state: Mapping[str, Any]) -> torch.Tensor | None:
    algorithm = state["engine"].get("algorithm")
    return None if algorithm is None else weight_of(algorithm)


def _averaged(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has a mean, by section, with parameters as their rank weights them."""
    algorithm, parameters, weight = state["engine"].get("algorithm"), state["parameters"], _weight(state)
    if weight is not None:
        wide = {name: torch.promote_types(x.dtype, torch.float32) for name, x in parameters.items()}
        parameters = {n: x.to(wide[n]) * weight if is_mixable(x) else x for n, x in parameters.items()}
    sections = {"parameters": parameters, "buffers": state["buffers"], "optimizers": state["optimizers"]}
    return sections | {"kept": {} if algorithm is None else algorithm["kept"]}


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


def reshard(
    states: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, torch.Size],
    lengths: Mapping[str, tuple[int, int]],
    names: Sequence[Sequence[str]],
    place: int,
    num_shards: int,
) -> dict[str, Any]:
    """Return the state of one of ``num_shards`` shards. Local.

    Raises CheckpointError: the shards do not make up a parameter of that length.

    Parameters
    ----------
    states : sequence of mapping
        The sections of the files of the old shards, in order. Rows that pad them are zeros.
    lengths : mapping of str to (int, int)
        By the name of a parameter that is divided now, the dimension along which it is, and its whole length there.
    names : sequence of sequence of str
        For each optimizer the names of its parameters, in the order of its groups.

    Returns
    -------
    dict
        Parameters, and those tensors of the optimizers that have a parameter's shape, are divided anew. Float buffers
        are the means over the old shards, all else is the first one's. Accumulated gradients, what was in flight and
        what the algorithm keeps are left out.
    """
    first = states[0]

    def joined(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape, part = shapes[name], parts[0]
        if part.shape == shape:  # every shard has it whole, or the first one all of it
            return part
        others = [index for index in range(len(shape)) if index >= part.dim() or part.shape[index] != shape[index]]
        if part.dim() != len(shape) or len(others) != 1 or len(parts) * part.shape[others[0]] < shape[others[0]]:
            raise CheckpointError(
                f"parameter {name!r} has the shape {list(shape)}, which {len(parts)} shards of {list(part.shape)} in "
                "the checkpoint do not make up; build the model as it was when it was saved"
            )
        return torch.cat(list(parts), others[0]).narrow(others[0], 0, shape[others[0]])

    def divided(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = joined(name, parts)
        if name not in lengths:
            return whole
        dimension, length = lengths[name]
        chunk = chunk_length(length, num_shards)
        own = whole.split(chunk, dimension)[place : place + 1]
        shape = list(whole.shape)
        shape[dimension] = chunk
        part = whole.new_zeros(shape)
        for values in own:
            part.narrow(dimension, 0, values.shape[dimension]).copy_(values)
        return part

    def of_optimizer(number: int, saved: Mapping[str, Any]) -> dict[str, Any]:
        numbers = [each for group in saved["param_groups"] for each in group["params"]]
        name_of = dict(zip(numbers, names[number], strict=True))
        entries = {}
        for key, entry in saved["state"].items():
            name = name_of[key]
            shape = first["parameters"][name].shape
            entries[key] = {
                field: divided(name, [state["optimizers"][number]["state"][key][field] for state in states])
                if isinstance(value, torch.Tensor) and value.shape == shape
                else value
                for field, value in entry.items()
            }
        return {**saved, "state": entries}

    return {
        **first,
        "parameters": {
            name: divided(name, [each["parameters"][name] for each in states]) for name in first["parameters"]
        },
        "buffers": {name: _mean([each["buffers"][name] for each in states]) for name in first["buffers"]},
        "gradients": {},
        "unreduced": {},
        "optimizers": [of_optimizer(number, saved) for number, saved in enumerate(first["optimizers"])],
        "engine": {"step": first["engine"]["step"]},
        "rng": None,
    }


def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first = values[0]
    if len(values) == 1 or not (first.is_floating_point() or first.is_complex()):
        return first
    wide = torch.promote_types(first.dtype, torch.float32)
    return torch.stack([each.to(wide) for each in values]).mean(0).to(first.dtype)
