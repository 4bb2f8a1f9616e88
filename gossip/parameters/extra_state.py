"""The state that modules keep outside of parameters and buffers: ``get_extra_state()`` and ``set_extra_state()``."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from loguru import logger
from torch import nn

from gossip.communication.world import World
from gossip.parameters.names import bare
from gossip.parameters.serializable_state import deserialize, serialize, to_serializable

_KEY = "_extra_state"  # as in a state_dict, after the module's name


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return the extra state of every part of the module that has one, by its key in a state_dict. Local.

    Raises TypeError: a state is not plain data; the text names its module.
    """
    return {key: to_serializable(part.get_extra_state(), _named(key)) for key, part in _parts(module)}


def load_extra_states(module: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """Set what :func:`extra_states` returned, and return what could not be restored, in words. Local."""
    parts = dict(_parts(module))
    for key, part in parts.items():
        if key in saved:
            own = copy.deepcopy(to_serializable(saved[key], key))  # a state may be shared, or view other values
            part.set_extra_state(own)
    left_out = [f"{_named(key)}: there is none in the checkpoint" for key in parts if key not in saved]
    return left_out + [f"{_named(key)}: the module here has none" for key in saved if key not in parts]


def snapshot_extra_states(module: nn.Module) -> Callable[[], None]:
    """Copy the extra states, and return a function that sets them again. Local."""
    saved = [(part, copy.deepcopy(part.get_extra_state())) for _, part in _parts(module)]

    def put_back() -> None:
        for part, state in saved:
            part.set_extra_state(state)

    return put_back


def copy_extra_states(module: nn.Module, source: nn.Module) -> None:
    """Set copies of the extra states of ``source``, which has the same parts. Local."""
    for (_, part), (_, of_source) in zip(_parts(module), _parts(source), strict=True):
        part.set_extra_state(copy.deepcopy(of_source.get_extra_state()))


def describe_extra_states(module: nn.Module) -> dict[str, str]:
    """Describe which parts have an extra state, as ranks compare it."""
    return {_named(key): "kept" for key, _ in _parts(module)}


def broadcast_extra_states(module: nn.Module, world: World) -> None:
    """Set the extra states of rank 0 on every rank. Collective; the parts that have one must be the same on all ranks.

    A state that is not plain data stays as it is, and a warning names its module.
    """
    if next(_parts(module), None) is None or world.world_size == 1:
        return
    text, values = serialize(_sendable(module)) if world.rank == 0 else ("", torch.empty(0, dtype=torch.uint8))
    what = "broadcasting extra states of modules from rank 0"
    described = world.gather_json({"text": text, "num_bytes": values.nbytes}, what)[0]
    if world.rank:
        values = torch.empty(described["num_bytes"], dtype=torch.uint8)
    if values.numel():
        held = values.to(world.control_device)
        world.broadcast_([held], what)
        values = held.cpu()
    if world.rank:
        load_extra_states(module, deserialize(described["text"], values))


def _sendable(module: nn.Module) -> dict[str, Any]:
    """Return the extra states that are plain data; a warning names the others."""
    found = {}
    for key, part in _parts(module):
        try:
            found[key] = to_serializable(part.get_extra_state(), _named(key))
        except TypeError as error:
            logger.warning("each rank keeps its own while the replicas are averaged: {}", error)
    return found


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield bare(f"{name}.{_KEY}" if name else _KEY), part


def _named(key: str) -> str:
    name = key.removesuffix(_KEY).removesuffix(".")
    return f"the extra state of module {name!r}" if name else "the extra state of the module"
