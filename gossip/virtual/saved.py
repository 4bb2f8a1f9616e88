"""The replicas' state, for any number of replicas and devices, and as one file that is what was written or refused."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.buffers import is_averaged
from gossip.checkpoints.files import HashingFile, reason, sync_folder
from gossip.checkpoints.plain import plain
from gossip.errors import CheckpointError
from gossip.virtual.shards import Shard

_MAGIC = b"gossip virtual workers 1 sha256 "
_TRAILER_BYTES = len(_MAGIC) + 64


def joined(stacks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The shards' stacks as one of all ranks, [n, ...], on the CPU; a copy."""
    return torch.cat([stack.detach().cpu() for stack in stacks]).clone()


def deal_(stacks: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Write the values of all ranks, [n, ...], into the shards' stacks."""
    with torch.no_grad():
        for stack, own in zip(stacks, values.split([len(stack) for stack in stacks]), strict=True):
            stack.copy_(own)


def resized(values: torch.Tensor, world_size: int) -> torch.Tensor:
    """The rows, if there are as many; else the mean of what can be averaged, and rank 0's of the rest, in every row."""
    if len(values) == world_size:
        return values
    wide = torch.promote_types(values.dtype, torch.float32)
    row = values.mean(0, dtype=wide).to(values.dtype) if is_averaged(values) else values[0]
    return row.expand(world_size, *row.shape)


def module_state(shards: Sequence[Shard]) -> dict[str, Any]:
    """Parameters and buffers, [n, *shape], by the bare module's names."""
    return {
        "parameters": {name: joined([each.parameters[name] for each in shards]) for name in shards[0].parameters},
        "buffers": {name: joined([each.buffers[name] for each in shards]) for name in shards[0].buffers},
    }


def optimizer_state(optimizer: Optimizer, num_shards: int) -> dict[str, Any]:
    """As ``optimizer.state_dict()``, with tensors of all ranks, [n, *shape], whatever the devices."""
    stacks = [stack for group in optimizer.param_groups for stack in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number in range(0, len(stacks), num_shards):
        entries = [optimizer.state[stack] for stack in stacks[number : number + num_shards] if stack in optimizer.state]
        if entries:
            state[number // num_shards] = {
                key: joined([entry[key] for entry in entries]) if _is_stacked(value, stacks[number]) else value
                for key, value in entries[0].items()
            }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any], num_shards: int, world_size: int) -> None:
    """Restore what :func:`optimizer_state` gave; for another number of replicas, the mean."""
    stacks = [stack for group in optimizer.param_groups for stack in group["params"]]
    optimizer.state.clear()
    for number, entry in saved["state"].items():
        own = stacks[number * num_shards : (number + 1) * num_shards]
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() == own[0].dim() and value.shape[1:] == own[0].shape[1:]:
                rows = resized(value, world_size).split([len(stack) for stack in own])
                for stack, each in zip(own, rows, strict=True):
                    optimizer.state[stack][key] = each.to(stack.device, copy=True).contiguous()
            else:
                for stack in own:
                    optimizer.state[stack][key] = value.clone() if isinstance(value, torch.Tensor) else value
    for group, constants in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update(constants)


def _is_stacked(value: Any, stack: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == stack.shape


def check_fits(saved: Mapping[str, Any], shards: Sequence[Shard], optimizers: Sequence[Optimizer]) -> None:
    """Refuse a state of another model.

    Raises
    ------
    ValueError
        Names the first difference and both values.
    """
    for section, here in (("parameters", shards[0].parameters), ("buffers", shards[0].buffers)):
        theirs = {name: _described(values) for name, values in saved[section].items()}
        ours = {name: _described(values) for name, values in here.items()}
        for name in dict.fromkeys([*theirs, *ours]):
            if theirs.get(name) != ours.get(name):
                raise ValueError(
                    f"{section[:-1]} {name!r} of a replica is {theirs.get(name, 'nothing')} in the saved state, but "
                    f"{ours.get(name, 'nothing')} here; build the workers over the same module"
                )
    groups = [len(each["param_groups"]) for each in saved["optimizers"]]
    if groups != [len(each.param_groups) for each in optimizers]:
        raise ValueError(
            f"the saved optimizers have {groups} parameter groups, those here "
            f"{[len(each.param_groups) for each in optimizers]}; build the workers with the same optimizer"
        )


def _described(values: torch.Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape[1:])}"


def write_state(state: Mapping[str, Any], path: Path) -> None:
    """Put a state into ``path``: whole and on the disk, or what was there before stays.

    Raises
    ------
    CheckpointError
        It cannot be written; with path and reason.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        file = HashingFile(partial)
        try:
            torch.save(plain(dict(state), "the state"), cast(IO[bytes], file))
            file.write(_MAGIC + file.finish().sha256.encode())
            file.finish()
        except Exception as error:
            raise file.error or error from error
        finally:
            file.close()
        os.replace(partial, path)
        sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{path} could not be saved: {reason(error)}; what was there before is intact") from error


def read_state(path: Path) -> dict[str, Any]:
    """What :func:`write_state` wrote; nothing is unpickled before its hash has been checked.

    Raises
    ------
    CheckpointError
        It is missing, damaged, or something else.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    body, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if not trailer.startswith(_MAGIC):
        raise CheckpointError(f"{path} is not what VirtualWorkers.save writes, or was truncated")
    if trailer.removeprefix(_MAGIC) != hashlib.sha256(body).hexdigest().encode():
        raise CheckpointError(f"{path} is not what was written: its SHA-256 differs")
    state: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    return state
