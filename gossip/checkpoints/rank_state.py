"""The contents of one rank's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gossip.checkpoints.model_description import describe_tensor
from gossip.errors import CheckpointError
from gossip.parameters.serializable_state import state_of, to_serializable
from gossip.step.state.kept_objects import is_stateful

SECTIONS: Mapping[str, type] = {
    "parameters": dict,
    "buffers": dict,
    "gradients": dict,
    "optimizers": list,
    "engine": dict,
    "stateful": dict,
    "data": dict,
}
"""The sections of every rank's file, besides the states of the random number generators."""
SECTIONS_WITH_NAMES = ("parameters", "buffers", "gradients", "unreduced", "optimizers", "engine")
"""The sections with names of parameters and buffers; earlier versions wrote those of compiled modules."""


def parts_state(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of the parts that have one, and the plain data. Local.

    Raises
    ------
    TypeError
        A part cannot be saved; the text names it, and what in it is unsuitable.
    """
    stateful, data = {}, {}
    for name, part in parts.items():
        if is_stateful(part):
            where = f"{name}.state_dict()"
            stateful[name] = to_serializable(state_of(part, where), where)
        else:
            data[name] = to_serializable(part, name)
    return {"stateful": stateful, "data": data}


def check_sections(state: Any, manifest: Mapping[str, Any], where: str) -> None:
    """Raise unless ``state``, read from a rank's file, has the expected sections and tensors."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{where} holds a {type(state).__name__}, not the state of a rank")
    for section, kind in SECTIONS.items():
        if type(state.get(section)) is not kind:
            raise CheckpointError(f"{where} has no {section!r}")
    found = {f"parameter {name!r}": tensor for name, tensor in state["parameters"].items()}
    found |= {f"buffer {name!r}": tensor for name, tensor in state["buffers"].items()}
    for key, described in manifest.get("shard", manifest["module"]).items():
        tensor = found.get(key)
        here = describe_tensor(tensor) if isinstance(tensor, torch.Tensor) else "nothing"
        if here != described:
            raise CheckpointError(f"{where}: {key} is {here}, but {described} in the manifest")
