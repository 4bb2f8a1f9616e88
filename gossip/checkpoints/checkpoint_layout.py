"""What a model is made of, in words that can be compared: with another rank's, and with a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.parameters.manifest import describe_topology
from gossip.private_torch import names_of_transient_buffers

if TYPE_CHECKING:
    from gossip.wrapper import GossipDataParallel


def describe(model: GossipDataParallel) -> dict[str, Any]:
    """Module, optimizers, buckets and topology, as plain data for the manifest. Local."""
    return {
        "module": describe_module(model.module),
        "optimizers": describe_optimizers(model),
        "buckets": describe_buckets(model),
        "unfrozen": [list(names) for names in model._live().unfrozen],
        "topology": describe_topology(model.topology),
        "compression": model.compression.describe(),
    }


def optimizers_of(model: GossipDataParallel) -> list[Optimizer]:
    """None, one or several, as a list."""
    optimizer: Any = model.optimizer
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, tuple | list) else [optimizer]


def describe_module(module: nn.Module) -> dict[str, str]:
    """Parameters and persistent buffers: what must be the same to load a checkpoint."""
    entries = {f"parameter {name!r}": describe_tensor(parameter) for name, parameter in module.named_parameters()}
    entries |= {f"buffer {name!r}": describe_tensor(buffer) for name, buffer in persistent_buffers(module)}
    return entries


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that belong to the module's state_dict, each once."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in names_of_transient_buffers(part)
    }
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in transient)


def describe_optimizers(model: GossipDataParallel) -> dict[str, str]:
    """Types, groups, and which parameter is where: state_dict() numbers the parameters, and has no names."""
    optimizers = optimizers_of(model)
    names = {id(parameter): repr(name) for name, parameter in model.module.named_parameters()}
    entries = {"number of optimizers": str(len(optimizers))}
    for number, optimizer in enumerate(optimizers, 1):
        title = f"optimizer {number}" if len(optimizers) > 1 else "optimizer"
        entries[title] = type(optimizer).__name__
        entries[f"{title}, number of groups"] = str(len(optimizer.param_groups))
        for place, group in enumerate(optimizer.param_groups, 1):
            entries[f"{title}, group {place}, number of parameters"] = str(len(group["params"]))
            for index, parameter in enumerate(group["params"], 1):
                entries[f"{title}, group {place}, parameter {index}"] = names.get(id(parameter), "outside the module")
    return entries


def describe_buckets(model: GossipDataParallel) -> list[str]:
    """Which value lies where in each bucket: a message in flight fits no other arrangement."""
    lines = []
    for bucket in model._buckets:
        views = zip(bucket.names, bucket.shape.views, strict=True)
        places = [f"{name}@{offset}{list(stride)}" for name, (_, stride, offset) in views]
        lines.append(f"trainable {_name(bucket.block.dtype)} {bucket.block.numel()}: {' '.join(places)}")
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
