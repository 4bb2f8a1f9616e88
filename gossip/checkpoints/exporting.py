"""The averaged model as one file that needs nothing of this package to be read."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from gossip.checkpoints.all_or_none import compare, engine_of, together
from gossip.checkpoints.checkpoint_files import sync_folder
from gossip.checkpoints.checkpoint_layout import describe_tensor, persistent_buffers
from gossip.errors import CheckpointError
from gossip.parameters.digests import chunks_in_memory_order, digest_of, memory_order

if TYPE_CHECKING:
    from gossip.communication.world import World
    from gossip.wrapper import GossipDataParallel


@torch.inference_mode(False)
@torch.no_grad()
def export(model: GossipDataParallel, path: str | os.PathLike[str]) -> Path:
    """Write the average of the replicas as a safetensors file, with the bare module's names. Collective.

    ``safetensors.torch.load_model(module, path)`` reads it. The model is not changed, and training goes on bit for bit.
    The mean over ranks of parameters and float buffers, summed in float32 or wider; rank 0's integer buffers; tied
    weights once. Rank 0 holds the result, the others 16 MiB of it at a time.

    Parameters
    ----------
    model : GossipDataParallel
        Between two steps, inside or outside of ``averaged()``. Replicas that are equal already, as after
        ``global_avg()``, are written as they are.
    path : path
        Of the file, on a disk that rank 0 sees; replaced by one rename once the new one is complete.

    Returns
    -------
    Path

    Raises
    ------
    CheckpointError
        Rank 0 could not write; raised on every rank. A file that was there before is intact.
    ManifestError
        The ranks' buffers differ in shape.
    ExchangeError
        A rank did not take part within the model's ``timeout``.

    Examples
    --------
    >>> import functools, gossip, torch
    >>> optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    >>> model = gossip.GossipDataParallel(torch.nn.Linear(2, 1), optimizer, "ring")
    >>> gossip.export(model, "model.safetensors")
    PosixPath('model.safetensors')
    """
    engine_of(model).check_alive()
    path = Path(path)
    module, world = model.module, model._world
    model._live().frozen.compare()
    equal = model._live().frozen.names_of_equal()
    replicas = together(model, "gossip.export", lambda: _begin(module, path, world.rank, equal))
    entries = {name: f"{describe_tensor(tensor)} strides {list(tensor.stride())}" for name, tensor in _exported(module)}
    compare(model, entries, "comparing what is exported")
    tensors: dict[str, torch.Tensor] = {}
    weights = model._live().weights()
    are_equal = len(set(replicas)) == 1
    with model._live().fatal():
        for name, tensor in _exported(module):
            if are_equal or name in equal or not _is_averaged(tensor):
                average = tensor.cpu() if world.rank == 0 else None
            else:
                average = _average(tensor, world, f"averaging {name!r}", weights.get(name, 1.0))
            if average is not None:
                tensors[name] = average.contiguous()
    together(model, f"exporting to {path}", lambda: _write(module, tensors, path) if world.rank == 0 else None)
    return path


def write_module(module: nn.Module, path: Path) -> None:
    """Write the module as it is, in the form of :func:`export`. Local.

    Raises
    ------
    OSError
        It cannot be written. A file that was there before is intact.
    """
    _write(module, {name: tensor.cpu().contiguous() for name, tensor in _exported(module)}, path)


def _begin(module: nn.Module, path: Path, rank: int, equal: Container[str]) -> str:
    """Whether rank 0 can write at all; and the hash of what need not be ``equal`` on all ranks."""
    if rank == 0 and not path.parent.is_dir():
        raise CheckpointError(f"{path.parent} is not a folder; make it first")
    hashed = (tensor for name, tensor in _exported(module) if name not in equal and _is_averaged(tensor))
    return digest_of(hashed).hex()


def _exported(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
    for name, buffer in persistent_buffers(module):
        yield name, buffer.detach()


def _is_averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _average(tensor: torch.Tensor, world: World, what: str, weight: float) -> torch.Tensor | None:
    """The mean over ranks, on the CPU of rank 0; in chunks. This rank's values count ``weight``."""
    result = torch.empty(tensor.numel(), dtype=tensor.dtype) if world.rank == 0 else None
    place = 0
    for chunk in chunks_in_memory_order(tensor):
        wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32), copy=True)
        if weight != 1.0:
            wide.mul_(weight)
        world.average_(torch.view_as_real(wide) if wide.is_complex() else wide, what)
        if result is not None:
            result[place : place + len(chunk)].copy_(wide)
        place += len(chunk)
    if result is None:
        return None
    order = memory_order(tensor)
    inverse = sorted(range(tensor.dim()), key=order.__getitem__)
    return result.view([tensor.shape[dim] for dim in order]).permute(inverse)


def _write(module: nn.Module, tensors: dict[str, torch.Tensor], path: Path) -> None:
    import safetensors.torch

    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tied = {
        name: names[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if names[id(parameter)] != name
    }
    partial = path.with_name(f".{path.name}.partial")
    try:
        # The metadata is what safetensors' own save_model leaves about tied weights.
        safetensors.torch.save_file(tensors, partial, metadata={"format": "pt", **tied})
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)
