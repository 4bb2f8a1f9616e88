"""The averaged model as a file that plain safetensors reads."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import safetensors
import torch
from checkpointing import DroppingNet, assert_same, everything, make_model, names_in, one_step
from ranks import run_ranks
from replicas import gathered
from safetensors.torch import load_file, load_model
from torch import nn

import gossip
from gossip import CheckpointError
from gossip.parameters import digests


class Everything(DroppingNet):
    """With strides, a scalar, nothing at all, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.sliced = nn.Parameter(torch.arange(30.0).view(5, 6).t()[1:4, :])
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("column", torch.arange(12.0).view(4, 3)[:, 1])


@mock.patch.object(digests, "CHUNK_BYTES", 40)  # several chunks, which do not end where rows do
def export_while_training(folder: str) -> None:
    undisturbed = make_model(module=Everything, topology="exponential")
    for _ in range(5):
        one_step(undisturbed)
    wanted = everything(undisturbed)
    undisturbed.close()

    model = make_model(module=Everything, topology="exponential")
    chunks = []
    average_ = model._world.average_
    model._world.average_ = lambda tensor, what: (chunks.append(tensor.numel()), average_(tensor, what))
    for step in range(3):
        one_step(model)
        with torch.no_grad():
            model.module.phase.fill_(complex(model.rank, step))
            model.module.conv.weight.add_(model.rank * torch.arange(54.0).view(3, 2, 3, 3))
            model.module.sliced.add_(model.rank)
        path = gossip.export(model, f"{folder}/step{step}.safetensors")
        rows = {name: gathered(tensor) for name, tensor in model.state_dict().items()}
        assert max(chunks) <= 20
        if model.rank == 0:
            module = Everything()
            module.sliced = nn.Parameter(module.sliced.detach().clone())  # safetensors takes no tensor with gaps
            module.column = module.column.clone()
            load_model(module, path)
            assert module.third.weight is module.second.weight
            for name, tensor in module.state_dict().items():
                if tensor.is_floating_point() or tensor.is_complex():
                    dtype = torch.complex128 if tensor.is_complex() else torch.float64
                    torch.testing.assert_close(tensor, rows[name].to(dtype).mean(0).to(tensor.dtype))
                else:
                    assert torch.equal(tensor, rows[name][0]), name
            assert "third.weight" not in load_file(path)
            assert "calls" not in load_file(path)
            with safetensors.safe_open(path, "pt") as file:
                assert file.metadata() == {"format": "pt", "third.weight": "second.weight"}
    model.close()

    model = make_model(module=Everything, topology="exponential")
    for _ in range(5):
        one_step(model)
        gossip.export(model, f"{folder}/last.safetensors")
    assert_same(everything(model), wanted)

    with model.averaged():
        gossip.export(model, f"{folder}/averaged.safetensors")
    model.global_avg()
    path = gossip.export(model, f"{folder}/global.safetensors")
    if model.rank == 0:
        exported, average = load_file(path), model.state_dict()
        for name, tensor in exported.items():
            assert torch.equal(tensor, average[name]), name
        assert_same(load_file(f"{folder}/averaged.safetensors"), exported)
        for name, tensor in load_file(f"{folder}/last.safetensors").items():
            torch.testing.assert_close(tensor, exported[name])


def test_export_is_the_average_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(export_while_training, str(tmp_path), world_size=3)
    assert all(name.endswith(".safetensors") for name in names_in(tmp_path))


def export_and_fail(folder: str) -> None:
    model = make_model()
    one_step(model)
    path = Path(folder) / "model.safetensors"
    gossip.export(model, path)
    before = path.read_bytes()
    one_step(model)
    with pytest.raises(CheckpointError, match=r"rank 0: .*/nowhere is not a folder; create it first"):
        gossip.export(model, f"{folder}/nowhere/model.safetensors")
    pwrite, places = os.pwrite, []

    def fill(descriptor: int, data: memoryview, place: int) -> int:
        places.append(place)
        if len(places) == 3:  # the header and one tensor are written, and others are not averaged yet
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, place)

    os.pwrite = fill
    with pytest.raises(CheckpointError, match=r"exporting to .*: rank 0: No space left on device .*model.safetensors"):
        gossip.export(model, path)
    os.pwrite = pwrite
    assert len(places) == (3 if model.rank == 0 else 0)
    torch.distributed.barrier()
    assert names_in(folder) == ["model.safetensors"]
    assert path.read_bytes() == before
    one_step(model)
    gossip.export(model, path)
    torch.distributed.barrier()
    assert path.read_bytes() != before


def test_export_that_fails_leaves_the_old_file_and_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(export_and_fail, str(tmp_path), world_size=2)
