"""The averaged model as one file that can be read without this package."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from gossip.checkpoints.all_or_none import together
from gossip.checkpoints.checkpoint_files import sync_folder
from gossip.checkpoints.checkpoint_layout import exported_tensors
from gossip.checkpoints.replicas import Replicas
from gossip.checkpoints.trained_models import TrainedModel, jointly


@torch.inference_mode(False)
@torch.no_grad()
def export(model: TrainedModel, path: str | os.PathLike[str]) -> Path:
    """Write the average of the replicas as a safetensors file, with the bare module's names. Collective.

    ``safetensors.torch.load_model(module, path)`` reads the file. The model is not changed, and training continues bit
    for bit. The file holds the mean over ranks of parameters and float buffers, summed in float32 or wider, rank 0's
    integer buffers, and tied weights once. Rank 0 holds the whole result in memory, the others 16 MiB of it at a time.

    Parameters
    ----------
    model : GossipDataParallel or VirtualWorkers
        The model, between two steps, inside or outside ``averaged()``. Replicas that are already equal, as after
        ``global_avg()``, are written as they are.
    path : path
        The path of the file, on a disk that rank 0 can access; an existing file is replaced by a single rename once the
        new one is complete.

    Returns
    -------
    Path
        The path of the file.

    Raises
    ------
    CheckpointError
        Rank 0 could not write the file; raised on every rank. An existing file is intact.
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
    return jointly(model, lambda replicas: _export(replicas, model.module, Path(path)))


def _export(replicas: Replicas, module: nn.Module, path: Path) -> Path:
    replicas.check_alive()
    tensors = replicas.averages(path)
    together(replicas, f"exporting to {path}", lambda: _write(module, tensors, path) if replicas.process == 0 else None)
    return path


def write_module(module: nn.Module, path: Path) -> None:
    """Write the module as it is, in the format of :func:`export`. Local.

    Raises
    ------
    OSError
        The file cannot be written. An existing file is intact.
    """
    _write(module, {name: tensor.cpu().contiguous() for name, tensor in exported_tensors(module)}, path)


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
