"""The replicas' state, for any number of replicas and devices, and as one file that is what was written or refused."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.optim import Optimizer

from gossip.checkpoints.checkpoint_files import HashingFile, reason, sync_folder
from gossip.checkpoints.plain_state import plain
from gossip.errors import CheckpointError
from gossip.parameters.buffers import is_averaged
from gossip.step.algorithm_state import for_new_world, weight_of
from gossip.virtual.shards import Shard
from gossip.virtual.stacked_optimizers import has_shape

_MAGIC = b"gossip virtual workers 1 sha256 "
_TRAILER_BYTES = len(_MAGIC) + 64
_OF_STACKS = ("params", "param_names")  # of a group, what depends on the number of devices


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
    """Parameters, buffers, and gradients that no_sync has accumulated, [n, *shape], by the bare module's names."""
    stacks = {name: [shard.parameters[name] for shard in shards] for name in shards[0].parameters}
    return {
        "parameters": {name: joined(by_shard) for name, by_shard in stacks.items()},
        "buffers": {name: joined([shard.buffers[name] for shard in shards]) for name in shards[0].buffers},
        "gradients": {
            name: joined([torch.zeros_like(stack) if stack.grad is None else stack.grad for stack in by_shard])
            for name, by_shard in stacks.items()
            if any(stack.grad is not None for stack in by_shard)
        },
    }


def load_module_state(saved: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Write parameters and buffers into the stacks; for another number of replicas, the mean."""
    world_size = shards[-1].ranks.stop
    for name, values in saved["parameters"].items():
        deal_([shard.parameters[name] for shard in shards], resized(values, world_size))
    for name, values in saved["buffers"].items():
        deal_([shard.buffers[name] for shard in shards], resized(values, world_size))


def for_other_world_size(
    saved: Mapping[str, Any], algorithm: Mapping[str, Any], world_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state with values weighted as the algorithm has it, and the algorithm's own for so many replicas."""
    weight = weight_of(algorithm)
    parameters = saved["parameters"]
    if weight is not None:
        parameters = {name: values * weight.view(-1, *[1] * (values.dim() - 1)) for name, values in parameters.items()}
    mean = {
        state: {name: resized(values, world_size) for name, values in by_name.items()}
        for state, by_name in algorithm["kept"].items()
    }
    numbers = {name: resized(values, world_size) for name, values in algorithm["numbers"].items()}
    return {**saved, "parameters": parameters}, for_new_world({**algorithm, "numbers": numbers}, mean)


def optimizer_state(optimizer: Optimizer, num_shards: int) -> dict[str, Any]:
    """As ``optimizer.state_dict()``, with tensors of all ranks, [n, *shape], whatever the devices."""
    state: dict[int, dict[str, dict[str, Any]]] = {}
    for number, stacks in enumerate(_held(optimizer, num_shards)):
        entries = [optimizer.state[stack] for stack in stacks if stack in optimizer.state]
        if entries:
            stacked = [key for key, value in entries[0].items() if has_shape(value, stacks[0])]
            state[number] = {
                "stacked": {key: joined([entry[key] for entry in entries]) for key in stacked},
                "common": {key: value for key, value in entries[0].items() if key not in stacked},
            }
    groups = [{key: value for key, value in group.items() if key not in _OF_STACKS} for group in optimizer.param_groups]
    return {"kind": _kind(optimizer, num_shards), "state": state, "param_groups": groups}


def _held(optimizer: Optimizer, num_shards: int) -> list[list[torch.Tensor]]:
    """The stacks of each parameter that the optimizer holds, in its order."""
    stacks = [stack for group in optimizer.param_groups for stack in group["params"]]
    return [stacks[start : start + num_shards] for start in range(0, len(stacks), num_shards)]


def _kind(optimizer: Optimizer, num_shards: int) -> str:
    sizes = ", ".join(str(len(group["params"]) // num_shards) for group in optimizer.param_groups)
    return f"{type(optimizer).__name__} with groups of {sizes} parameters"


def load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any], num_shards: int, world_size: int) -> None:
    """Restore what :func:`optimizer_state` gave; for another number of replicas, the mean."""
    held = _held(optimizer, num_shards)
    optimizer.state.clear()
    for number, entry in saved["state"].items():
        for stack in held[number]:
            optimizer.state[stack].update(copy.deepcopy(entry["common"]))
        for key, values in entry["stacked"].items():
            rows = resized(values, world_size).split([len(stack) for stack in held[number]])
            for stack, own in zip(held[number], rows, strict=True):
                optimizer.state[stack][key] = own.to(stack.device, copy=True).contiguous()
    for group, constants in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update(constants)


def check_fits(saved: Mapping[str, Any], shards: Sequence[Shard], optimizers: Sequence[Optimizer]) -> None:
    """Refuse a state of another model.

    Raises
    ------
    ValueError
        Names the first difference and both values.
    """
    if missing := {"parameters", "buffers", "optimizers", "in_flight"} - saved.keys():
        raise ValueError(
            f"state has no {min(missing)!r}: it is not what VirtualWorkers.state_dict() gave; load a bare module's "
            "state into the module, before the workers are built"
        )
    for section, here in (("parameters", shards[0].parameters), ("buffers", shards[0].buffers)):
        found = {name: _described(values) for name, values in saved[section].items()}
        wanted = {name: _described(values) for name, values in here.items()}
        for name in dict.fromkeys([*found, *wanted]):
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"{section[:-1]} {name!r} of a replica is {found.get(name, 'nothing')} in the saved state, but "
                    f"{wanted.get(name, 'nothing')} here; build the workers over the same module"
                )
    theirs_, ours_ = (
        [optimizer["kind"] for optimizer in saved["optimizers"]],
        [_kind(optimizer, len(shards)) for optimizer in optimizers],
    )
    if theirs_ != ours_:
        raise ValueError(
            f"the saved optimizers are {'; '.join(theirs_) or 'none'}, those here {'; '.join(ours_) or 'none'}; build "
            "the workers with the same optimizer"
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
        raise CheckpointError(f"{path} could not be saved: {reason(error)}; what was there before is intact") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


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
