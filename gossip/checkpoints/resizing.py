"""The state of n ranks combined into one from which any other number can start; that of shards, for another number."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gossip.errors import CheckpointError, reason
from gossip.parameters.buckets import is_mixable
from gossip.parameters.buffers import is_averaged
from gossip.sharding.shard_mesh import Division
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
    divisions: Mapping[str, Division],
    names: Sequence[Sequence[str]],
    place: int,
) -> dict[str, Any]:
    """Return the state of the shard of this place. Local.

    Raises CheckpointError: the shards do not make up a parameter of that length.

    Parameters
    ----------
    states : sequence of mapping
        The sections of the files of the old shards, in order. Rows that pad them are zeros.
    divisions : mapping of str to Division
        By the name of a parameter that is divided now, how it is.
    names : sequence of sequence of str
        For each optimizer the names of its parameters, in the order of its groups.

    Returns
    -------
    dict
        Parameters, and those tensors of the optimizers that have a parameter's shape, are divided anew. Float buffers
        are the means over the old shards, all else is that of the first one that has any of the parameter. Accumulated
        gradients, what was in flight and what the algorithm keeps are left out.
    """
    first = states[0]

    def joined(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        shape, found = shapes[name], [part.shape for part in parts]
        if all(each == shape for each in found):  # every shard has it whole, or the first one all of it
            return parts[0]
        others = [
            index for index, size in enumerate(shape) if any(each[index : index + 1] != (size,) for each in found)
        ]
        is_alike = all(len(each) == len(shape) for each in found) and len(others) == 1
        if not is_alike or sum(each[others[0]] for each in found) < shape[others[0]]:
            raise CheckpointError(
                f"parameter {name!r} has the shape {list(shape)}, which {len(parts)} shards of {list(found[0])} in "
                "the checkpoint do not make up; build the model as it was when it was saved"
            )
        return torch.cat(list(parts), others[0]).narrow(others[0], 0, shape[others[0]])

    def divided(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = joined(name, parts)
        if (division := divisions.get(name)) is None:
            return whole
        own = division.part(whole, place)
        shape = list(whole.shape)
        shape[division.dimension] = division.lengths[place]
        part = whole.new_zeros(shape)
        part.narrow(division.dimension, 0, own.shape[division.dimension]).copy_(own)
        return part

    def of_entry(name: str, values: Sequence[Any]) -> Any:
        parts = [state["parameters"][name] for state in states]
        tensors = [
            part.new_zeros(part.shape) if each is None else each for part, each in zip(parts, values, strict=True)
        ]
        if all(
            isinstance(each, torch.Tensor) and each.shape == part.shape
            for part, each in zip(parts, tensors, strict=True)
        ):
            return divided(name, tensors)
        return next(each for each in values if each is not None)

    def of_optimizer(number: int, saved: Mapping[str, Any]) -> dict[str, Any]:
        numbers = [each for group in saved["param_groups"] for each in group["params"]]
        entries = {}
        for key, name in zip(numbers, names[number], strict=True):
            held = [state["optimizers"][number]["state"].get(key, {}) for state in states]
            if fields := dict.fromkeys(field for entry in held for field in entry):
                entries[key] = {field: of_entry(name, [entry.get(field) for entry in held]) for field in fields}
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
