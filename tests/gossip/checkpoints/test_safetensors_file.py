"""Files that are written piece by piece and read by the safetensors library."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
import torch
from checkpointing import names_in
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from gossip import CheckpointError
from gossip.checkpoints.exporting import write_module
from gossip.checkpoints.safetensors_file import SafetensorsFile
from gossip.parameters import digests

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def values_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bytes, NaN of all kinds among them; zero and one where the dtype knows nothing else."""
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel() * dtype.itemsize
    largest = 2 if dtype == torch.bool else 256
    return torch.randint(0, largest, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    with SafetensorsFile(path, tensors, metadata or {"format": "pt"}) as file:
        file.begin()
        for name, tensor in tensors.items():
            file.write(name, tensor)
        file.finish()


@pytest.fixture(params=[1, 40, 16 * 2**20], ids=lambda size: f"{size}B")
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("chunk_bytes")
def test_every_dtype_is_written_as_the_library_does(tmp_path: Path) -> None:
    tensors = {}
    for dtype in DTYPES:
        tensors[f"{dtype} matrix"] = values_of(dtype, 5, 7)
        tensors[f"{dtype} scalar"] = values_of(dtype)
        tensors[f"{dtype} empty"] = values_of(dtype, 0, 3)
    tensors = dict(sorted(tensors.items()))  # not the order of the file
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes_of(found[name]) == bytes_of(tensor), name
    with safetensors.safe_open(tmp_path / "ours", "pt") as file:
        assert torch.equal(file.get_slice("torch.int64 matrix")[1:3, 2], tensors["torch.int64 matrix"][1:3, 2])


@pytest.mark.usefixtures("chunk_bytes")
def test_strides_are_of_no_consequence(tmp_path: Path) -> None:
    grid = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    tensors = {
        "channels last": grid.to(memory_format=torch.channels_last),
        "transposed": grid[0, 0].t(),
        "with gaps": grid[:, 1:, ::2],
        "a column": grid[0, 0, :, 1],
        "expanded": grid[0, 0, 0].expand(3, 5),
        "requires grad": grid[0].clone().requires_grad_(),
    }
    write(tmp_path / "ours", tensors)
    save_file(
        {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()},
        tmp_path / "theirs",
        {"format": "pt"},
    )
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_names_and_metadata_are_any_text(tmp_path: Path) -> None:
    tensors = {name: torch.tensor([float(number)]) for number, name in enumerate(["é\n", 'a"b\\', "z", "\x7f", "𝄞"])}
    write(tmp_path / "ours", tensors, {"größe": "1 \t"})
    save_file(tensors, tmp_path / "theirs", {"größe": "1 \t"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_nothing_at_all_is_a_file(tmp_path: Path) -> None:
    write(tmp_path / "ours", {})
    assert load_file(tmp_path / "ours") == {}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.third.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("transient", torch.ones(2), persistent=False)


def test_module_with_tied_weights_is_read_back(tmp_path: Path) -> None:
    module, found = Tied(), Tied()
    write_module(module, tmp_path / "ours")
    assert load_model(found, tmp_path / "ours") == (set(), [])
    for name, tensor in module.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    save_model(module, str(tmp_path / "theirs"), {"format": "pt"})
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("ours", "theirs"))
    ends = [8 + int.from_bytes(content[:8], "little") for content in (ours, theirs)]
    assert ends[0] == ends[1]
    assert ours[ends[0] :] == theirs[ends[1] :]
    assert json.loads(ours[8 : ends[0]]) == json.loads(theirs[8 : ends[1]])  # the library shuffles the metadata


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.arange(50.0), "b": torch.arange(9)}
    write(tmp_path / "wanted", tensors)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, place: pwrite(descriptor, data[:7], place))
    write(tmp_path / "found", tensors)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


@pytest.mark.parametrize("failing", range(3))
def test_full_disk_leaves_the_old_file_alone(failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    write(path, {"a": torch.zeros(3), "b": torch.ones(3)})
    before = path.read_bytes()
    written, pwrite = [], os.pwrite

    def fail(descriptor: int, data: memoryview, place: int) -> int:
        written.append(place)
        if len(written) > failing:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write(path, {"a": torch.ones(3), "b": torch.ones(3)})
    assert len(written) == failing + 1
    assert names_in(tmp_path) == ["model"]
    assert path.read_bytes() == before


def test_what_cannot_be_written_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'b' is torch.complex128, which safetensors files cannot hold"):
        write(tmp_path / "model", {"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="nowhere is not a folder; create it first"):
        write_module(nn.Linear(1, 1), tmp_path / "nowhere" / "model")
    (tmp_path / ".model.partial").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "model", {})
    assert names_in(tmp_path) == [".model.partial"]


def test_what_an_earlier_attempt_left_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".model.partial").write_bytes(b"x" * 10_000)
    write(tmp_path / "model", {"a": torch.ones(3)})
    assert names_in(tmp_path) == ["model"]
    assert load_file(tmp_path / "model")["a"].tolist() == [1.0, 1.0, 1.0]
