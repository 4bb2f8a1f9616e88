"""The averaged model as one file that can be read without this package."""

import os
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from gossip.checkpoints.replicas import Replicas, exported_tensors, run_on_all_ranks
from gossip.checkpoints.safetensors_file import SafetensorsFile
from gossip.checkpoints.trained_models import TrainedModel, collectively
from gossip.parameters.names import named_parameters


@torch.inference_mode(False)
@torch.no_grad()
def export(model: TrainedModel, path: str | os.PathLike[str]) -> Path:
    """Write the average of the replicas as a safetensors file, with the bare module's names. Collective.

    ``safetensors.torch.load_model(module, path)`` reads the file. The model is not changed, and training continues bit
    for bit. The file holds the mean over ranks of parameters and float buffers, summed in float32 or wider, rank 0's
    integer buffers, and tied weights once.

    Tensors are averaged, gathered and written one after the other: rank 0 holds, in CPU memory, a single one at a time,
    at most the largest of the model, and a few chunks of 16 MiB; the other ranks hold a few chunks.

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
    return collectively(model, lambda replicas: _export(replicas, model.module, Path(path)))


def _export(replicas: Replicas, module: nn.Module, path: Path) -> Path:
    what = f"exporting to {path}"
    with closing(SafetensorsFile(path, replicas.exported(), _metadata(module))) as file:
        run_on_all_ranks(replicas, what, lambda: file.begin() if replicas.process == 0 else None)
        failure: Exception | None = None
        for name, tensor in replicas.averages():
            if tensor is not None and failure is None:
                try:
                    file.write(name, tensor)
                except Exception as error:
                    failure = error  # the others are told at the end: in between, they average with this rank
            del tensor

        def finish() -> None:
            if failure is not None:
                raise failure
            if replicas.process == 0:
                file.finish()

        run_on_all_ranks(replicas, what, finish)
    return path


def write_module(module: nn.Module, path: Path) -> None:
    """Write the module as it is, in the format of :func:`export`. Local.

    Raises OSError: the file cannot be written. An existing file is intact; CheckpointError: the folder does not exist,
    or the format does not have the dtype of a tensor.
    """
    tensors = dict(exported_tensors(module))
    with closing(SafetensorsFile(path, tensors, _metadata(module))) as file:
        file.begin()
        for name, tensor in tensors.items():
            file.write(name, tensor)
        file.finish()


def _metadata(module: nn.Module) -> dict[str, str]:
    """Return what safetensors' own ``save_model`` leaves about tied weights."""
    names = {id(parameter): name for name, parameter in named_parameters(module)}
    tied = {
        name: names[id(parameter)]
        for name, parameter in named_parameters(module, remove_duplicate=False)
        if names[id(parameter)] != name
    }
    return {"format": "pt", **tied}
