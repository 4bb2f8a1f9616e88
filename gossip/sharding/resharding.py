"""The states of one number of shards as the state of a shard of another number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gossip.errors import CheckpointError


def chunk_length(length: int, num_shards: int) -> int:
    """How many rows each shard has of ``length``, the last ones padded with zeros."""
    return -(-length // num_shards)


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
