"""How much memory an export takes beside the model: a tensor and some chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from live_memory import LiveBytes
from ranks import run_ranks
from safetensors.torch import load_file
from sharded_models import make_sharded
from torch import nn

import gossip
from gossip.parameters import digests

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


def export_from_ranks(folder: Path, shape: tuple[int, int] | None, shard: str) -> int:
    module, arguments = make_module(), {}
    if shape is not None:
        module, arguments = make_sharded(module, shape, shard)
    with gossip.GossipDataParallel(module, partial(torch.optim.SGD, lr=0.1), "ring", **arguments) as model:
        generator = torch.Generator().manual_seed(dist.get_rank())
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        return peak_of(lambda: gossip.export(model, folder / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, (1, 4)], ids=str)
def test_rank_0_holds_a_tensor_and_the_others_chunks(shape: tuple[int, int] | None, tmp_path: Path) -> None:
    world_size = 2 if shape is None else shape[0] * shape[1]
    peaks = run_ranks(export_from_ranks, tmp_path, shape, "fsdp", world_size=world_size)
    assert LARGEST_BYTES <= peaks[0] <= LARGEST_BYTES + SOME_BYTES < 0.5 * TOTAL_BYTES
    assert max(peaks[1:], default=0) <= SOME_BYTES < 0.9 * LARGEST_BYTES
    exported = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.nbytes for tensor in exported.values()) == TOTAL_BYTES


def test_virtual_workers_hold_a_mean_at_a_time(tmp_path: Path) -> None:
    workers = gossip.VirtualWorkers(make_module(), 2, partial(torch.optim.SGD, lr=0.1), "ring")
    assert peak_of(lambda: gossip.export(workers, tmp_path / "model.safetensors")) <= LARGEST_BYTES + SOME_BYTES
