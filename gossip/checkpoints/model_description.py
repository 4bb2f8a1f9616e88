"""Textual descriptions of a model, which can be compared with another rank's and with a checkpoint's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from gossip.parameters.buckets import Bucket, BufferBucket, persistent_buffers
from gossip.parameters.manifest import describe_topology
from gossip.parameters.names import named_parameters
from gossip.sharding.shard_mesh import Division

Divisions = Mapping[str, Division]
NOT_DIVIDED: Divisions = MappingProxyType({})


def exported_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of everything in the module's state_dict, each tensor once."""
    for name, parameter in named_parameters(module):
        yield name, parameter.detach()
    for name, buffer in persistent_buffers(module):
        yield name, buffer.detach()


def describe_model(
    model: Any,
    optimizers: Mapping[str, str],
    buckets: Iterable[Bucket | BufferBucket],
    unfrozen: Iterable[Sequence[str]],
    divisions: Divisions = NOT_DIVIDED,
) -> dict[str, Any]:
    """Describe a GossipDataParallel or VirtualWorkers as plain data for the manifest."""
    return {
        "module": describe_module(model.module),
        "optimizers": optimizers,
        "buckets": describe_buckets(buckets, divisions),
        "unfrozen": [list(names) for names in unfrozen],
        "topology": describe_topology(model.topology),
        "compression": model.compression.describe(),
        "algorithm": type(model.algorithm).__name__,
    }


def describe_module(module: nn.Module, divisions: Divisions = NOT_DIVIDED) -> dict[str, str]:
    """Describe parameters and persistent buffers, which must match for a checkpoint to be loaded.

    ``divisions`` are those of a shard's parameters that have other shapes on other ranks, where the text is the same.
    """
    entries = {
        f"parameter {name!r}": describe_part(parameter, divisions.get(name))
        for name, parameter in named_parameters(module)
    }
    entries |= {f"buffer {name!r}": describe_part(buffer, None) for name, buffer in persistent_buffers(module)}
    return entries


def describe_optimizers(
    groups: Sequence[tuple[str, Sequence[Sequence[torch.Tensor]]]], named: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Describe types, groups and the place of each parameter, which state_dict() numbers without their names."""
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


def describe_buckets(buckets: Iterable[Bucket | BufferBucket], divisions: Divisions = NOT_DIVIDED) -> list[str]:
    """Describe where each value lies in each bucket: a message in flight fits no other arrangement.

    It follows from the order of the parameters where these are divided unequally, so that each rank has others.
    """
    lines = []
    for bucket in buckets:
        kind = "trainable" if isinstance(bucket, Bucket) else "buffers"
        if not divisions.keys().isdisjoint(bucket.names):
            lines.append(f"{kind} {_name(bucket.block.dtype)}: {' '.join(bucket.names)}")
            continue
        views = zip(bucket.names, bucket.shape.views, strict=False)  # of buffers one, over all
        places = [f"{name}@{offset}{list(stride)}" for name, (_, stride, offset) in views]
        lines.append(f"{kind} {_name(bucket.block.dtype)} {bucket.block.numel()}: {' '.join(places)}")
    return lines


def describe_part(tensor: torch.Tensor, division: Division | None) -> str:
    """Describe dtype and shape of a tensor; of a part, those of the whole, and where the parts begin."""
    if division is None:
        return f"{_name(tensor.dtype)} {list(tensor.shape)}"
    return f"{_name(tensor.dtype)} {division.whole_shape(tensor.shape)} divided at {list(division.starts)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
