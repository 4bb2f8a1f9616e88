"""Files that are written piece by piece, byte for byte as the safetensors library writes them."""

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from checkpointing import names_in
from safetensors.torch import save_file

from gossip import CheckpointError
from gossip.checkpoints import safetensors_file
from gossip.checkpoints.safetensors_file import SafetensorsFile
from gossip.parameters import digests


def values_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bytes, NaN of all kinds among them; zero and one where the dtype knows nothing else."""
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape).numel() * dtype.itemsize
    largest = 2 if dtype == torch.bool else 256
    return torch.randint(0, largest, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with closing(SafetensorsFile(path, tensors, {"format": "pt"})) as file:
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
    for dtype in safetensors_file._NAMES:
        tensors[f"{dtype} matrix"] = values_of(dtype, 5, 7)
        tensors[f"{dtype} scalar"] = values_of(dtype)
        tensors[f"{dtype} empty"] = values_of(dtype, 0, 3)
    tensors = dict(sorted(tensors.items()))  # not the order of the file
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.arange(50.0), "b": torch.arange(9)}
    write(tmp_path / "wanted", tensors)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, place: pwrite(descriptor, data[:7], place))
    write(tmp_path / "found", tensors)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_what_cannot_be_written_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'b' is torch.complex128, which safetensors files cannot hold"):
        write(tmp_path / "model", {"a": torch.zeros(1), "b": torch.zeros(1, dtype=torch.complex128)})
    (tmp_path / ".model.partial").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "model", {})
    assert names_in(tmp_path) == [".model.partial"]
