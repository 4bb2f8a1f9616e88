"""The averaged model as a file that plain safetensors reads."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import safetensors
import torch
import torch.distributed as dist
from checkpointing import DroppingNet, assert_same, everything, make_model, names_in, one_step, undisturbed
from live_memory import LiveBytes
from ranks import on_ranks, run_ranks
from replicas import gathered
from safetensors.torch import load_file, load_model
from sharded_models import make_sharded
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


@on_ranks(3)
@mock.patch.object(digests, "CHUNK_BYTES", 40)  # several chunks, which do not end where rows do
def test_export_is_the_average_and_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    wanted = undisturbed(5, module=Everything, topology="exponential")

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
        path = gossip.export(model, f"{tmp_path}/step{step}.safetensors")
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

    model = make_model(module=Everything, topology="exponential")
    for _ in range(5):
        one_step(model)
        gossip.export(model, tmp_path / "last.safetensors")
    assert_same(everything(model), wanted)

    with model.averaged():
        gossip.export(model, tmp_path / "averaged.safetensors")
    model.global_avg()
    path = gossip.export(model, tmp_path / "global.safetensors")
    if model.rank == 0:
        exported, average = load_file(path), model.state_dict()
        assert_same(exported, {name: average[name] for name in exported})
        assert_same(load_file(tmp_path / "averaged.safetensors"), exported)
        for name, tensor in load_file(tmp_path / "last.safetensors").items():
            torch.testing.assert_close(tensor, exported[name])
        assert all(name.endswith(".safetensors") for name in names_in(tmp_path))


@on_ranks(2)
def test_export_that_fails_leaves_the_old_file_and_is_an_error_on_every_rank(tmp_path: Path) -> None:
    model = make_model()
    one_step(model)
    path = tmp_path / "model.safetensors"
    gossip.export(model, path)
    before = path.read_bytes()
    one_step(model)
    with pytest.raises(CheckpointError, match=r"rank 0: .*/nowhere is not a folder; create it first"):
        gossip.export(model, f"{tmp_path}/nowhere/model.safetensors")
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
    assert names_in(tmp_path) == ["model.safetensors"]
    assert path.read_bytes() == before
    one_step(model)
    gossip.export(model, path)
    torch.distributed.barrier()
    assert path.read_bytes() != before


# ---------------------------------------------------------------------- memory beside the model

CHUNK_BYTES = 2**14
SOME_BYTES = 12 * CHUNK_BYTES
WIDTH, NUM_LAYERS = 256, 8
LARGEST_BYTES = 2 * WIDTH * WIDTH * 4
TOTAL_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4 + LARGEST_BYTES


def make_module() -> nn.Module:
    """Several layers, the last of twice the size of the others."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2 * WIDTH, bias=False))


def peak_of(export: Callable[[], object]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "CHUNK_BYTES", CHUNK_BYTES)
        with LiveBytes() as memory:
            export()
    return memory.peak


def export_from_ranks(folder: Path, shape: tuple[int, int] | None) -> int:
    module, arguments = make_module(), {}
    if shape is not None:
        module, arguments = make_sharded(module, shape)
    with gossip.GossipDataParallel(module, partial(torch.optim.SGD, lr=0.1), "ring", **arguments) as model:
        generator = torch.Generator().manual_seed(dist.get_rank())
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        return peak_of(lambda: gossip.export(model, folder / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, (1, 4)], ids=str)
def test_rank_0_holds_a_tensor_and_the_others_chunks(shape: tuple[int, int] | None, tmp_path: Path) -> None:
    world_size = 2 if shape is None else shape[0] * shape[1]
    peaks = run_ranks(export_from_ranks, tmp_path, shape, world_size=world_size)
    assert LARGEST_BYTES <= peaks[0] <= LARGEST_BYTES + SOME_BYTES < 0.5 * TOTAL_BYTES
    assert max(peaks[1:], default=0) <= SOME_BYTES < 0.9 * LARGEST_BYTES
    exported = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.nbytes for tensor in exported.values()) == TOTAL_BYTES


def test_virtual_workers_hold_a_mean_at_a_time(tmp_path: Path) -> None:
    workers = gossip.VirtualWorkers(make_module(), 2, partial(torch.optim.SGD, lr=0.1), "ring")
    assert peak_of(lambda: gossip.export(workers, tmp_path / "model.safetensors")) <= LARGEST_BYTES + SOME_BYTES
