"""What a model is made of, in words that can be compared: with another rank's, and with a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from gossip.parameters.buckets import Bucket
from gossip.parameters.buffers import BufferBucket, persistent_buffers


def exported_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What belongs to the module's state_dict, each tensor once."""
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
    for name, buffer in persistent_buffers(module):
        yield name, buffer.detach()


def describe_module(module: nn.Module) -> dict[str, str]:
    """Parameters and persistent buffers: what must be the same to load a checkpoint."""
    entries = {f"parameter {name!r}": describe_tensor(parameter) for name, parameter in module.named_parameters()}
    entries |= {f"buffer {name!r}": describe_tensor(buffer) for name, buffer in persistent_buffers(module)}
    return entries


def describe_optimizers(
    groups: Sequence[tuple[str, Sequence[Sequence[torch.Tensor]]]], named: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Types, groups, and which parameter is where: state_dict() numbers the parameters, and has no names.

    Parameters
    ----------
    groups : sequence of (str, sequence of sequence of Tensor)
        Of each optimizer its type and the parameters of its groups.
    named : iterable of (str, Tensor)
        The parameters that have a name.
    """
    names = {id(parameter): repr(name) for name, parameter in named}
    entries = {"number of optimizers": str(len(groups))}
    for number, (kind, parameters_by_group) in enumerate(groups, 1):
        title = f"optimizer {number}" if len(groups) > 1 else "optimizer"
        entries[title] = kind
        entries[f"{title}, number of groups"] = str(len(parameters_by_group))
        for place, parameters in enumerate(parameters_by_group, 1):
            entries[f"{title}, group {place}, number of parameters"] = str(len(parameters))
            for index, parameter in enumerate(parameters, 1):
                entries[f"{title}, group {place}, parameter {index}"] = names.get(id(parameter), "outside the module")
    return entries


def describe_buckets(buckets: Iterable[Bucket | BufferBucket]) -> list[str]:
    """Which value lies where in each bucket: a message in flight fits no other arrangement."""
    lines = []
    for bucket in buckets:
        kind = "trainable" if isinstance(bucket, Bucket) else "buffers"
        views = zip(bucket.names, bucket.shape.views, strict=False)  # of buffers one, over all
        places = [f"{name}@{offset}{list(stride)}" for name, (_, stride, offset) in views]
        lines.append(f"{kind} {_name(bucket.block.dtype)} {bucket.block.numel()}: {' '.join(places)}")
    return lines


def first_difference(saved: Mapping[str, str], present: Mapping[str, str]) -> str | None:
    """The first entry that is not the same in a checkpoint and here, with both values."""
    for key in dict.fromkeys([*saved, *present]):
        if saved.get(key) != present.get(key):
            return f"{key} is {saved.get(key, 'nothing')} in the checkpoint, but {present.get(key, 'nothing')} here"
    return None


def describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype and shape."""
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
