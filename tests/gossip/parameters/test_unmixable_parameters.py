"""Frozen parameters of dtypes that cannot be mixed: equal on all ranks, or rank 0's where a mean is asked for."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from small_runs import SGD
from torch import nn

import gossip
from gossip import GossipDataParallel, GossipError, VirtualWorkers

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
} | {"complex64": torch.complex64}


class Quantized(nn.Module):
    """A layer whose base weights are codes, and an adapter that is trained."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        values = torch.arange(first, first + 32).reshape(8, 4) % 5
        self.codes = nn.ParameterDict(
            {name: nn.Parameter(values.to(dtype), requires_grad=False) for name, dtype in DTYPES.items()}
        )
        self.scale = nn.Parameter(torch.tensor([3], dtype=torch.uint8), requires_grad=False)
        self.adapter = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = x @ self.codes["uint8"].float().t() / self.scale.float()
        return base + self.adapter(x)


def codes_of(module: nn.Module) -> torch.Tensor:
    """The codes, [dtypes, 8, 4]."""
    return torch.stack([module.get_parameter(f"codes.{name}").detach().to(torch.complex64) for name in DTYPES])


def one_step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().mean().backward()


def train_and_edit(on_peer_loss: str, folder: Path) -> None:
    rank = torch.distributed.get_rank()
    first, edited = codes_of(Quantized()), codes_of(Quantized(1))
    module = Quantized(rank)
    model = GossipDataParallel(module, SGD, "ring", on_peer_loss=on_peer_loss, timeout=timedelta(seconds=20))
    assert torch.equal(codes_of(module), first)
    one_step(model)
    one_step(model)
    assert model.stats().bytes_sent == 4 * (4 * 8 + 8)
    if rank == 1:
        with torch.no_grad():
            for name, values in Quantized(1).codes.items():
                module.codes[name].copy_(values)
    own = edited if rank == 1 else first
    assert all(value == value for value in model.consensus_distance())
    assert torch.equal(codes_of(module), own)
    with model.averaged():
        assert torch.equal(codes_of(module), first)
    assert torch.equal(codes_of(module), own)
    gossip.save(model, folder / "saved")
    gossip.export(model, folder / "exported.safetensors")
    model.global_avg()
    assert torch.equal(codes_of(module), first)
    gossip.load(model, folder / "saved")
    assert torch.equal(codes_of(module), own)
    one_step(model)


@pytest.mark.parametrize("on_peer_loss", ["raise", "continue"])
def test_codes_start_equal_and_averages_have_rank_0s(on_peer_loss: str, tmp_path: Path) -> None:
    run_ranks(train_and_edit, on_peer_loss, tmp_path, world_size=2)
    first = codes_of(Quantized())
    exported = load_file(tmp_path / "exported.safetensors")
    assert torch.equal(torch.stack([exported[f"codes.{name}"].to(torch.complex64) for name in DTYPES]), first)
    with GossipDataParallel(Quantized(2), SGD) as model:  # one rank from the mean of two
        gossip.load(model, tmp_path / "saved")
        assert torch.equal(codes_of(model.module), first)
        one_step(model)
    workers = VirtualWorkers(Quantized(2), 2, SGD)
    gossip.load(workers, tmp_path / "saved")
    assert torch.equal(codes_of(workers.replica(1)), codes_of(Quantized(1)))


def test_virtual_workers_keep_codes_and_average_to_rank_0s(tmp_path: Path) -> None:
    workers, first = VirtualWorkers(Quantized(), 3, SGD, "ring"), codes_of(Quantized())
    one_step(workers)
    for name, stack in workers.named_parameters():
        if name.startswith("codes."):
            stack[1:] = Quantized(1).get_parameter(name)
    one_step(workers)
    assert all(value == value for value in workers.consensus_distance())
    with workers.averaged() as module:
        assert torch.equal(codes_of(module), first)
    assert torch.equal(codes_of(workers.replica(2)), codes_of(Quantized(1)))
    gossip.save(workers, tmp_path)
    gossip.export(workers, tmp_path / "exported.safetensors")
    assert torch.equal(load_file(tmp_path / "exported.safetensors")["codes.int8"], Quantized().codes["int8"])
    workers.global_avg()
    assert torch.equal(codes_of(workers.replica(2)), first)
    gossip.load(workers, tmp_path)
    assert torch.equal(codes_of(workers.replica(2)), codes_of(Quantized(1)))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("is_virtual", [True, False])
def test_codes_that_are_unfrozen_are_refused_by_name(is_virtual: bool, dtype: str) -> None:
    model = VirtualWorkers(Quantized(), 2, SGD) if is_virtual else GossipDataParallel(Quantized(), SGD)
    dict(model.named_parameters())[f"codes.{dtype}"].requires_grad_(True)
    text = rf"parameter 'codes.{dtype}' was unfrozen, but has the dtype torch.{dtype}; only float64, .* leave it frozen"
    with pytest.raises(GossipError, match=text):
        one_step(model)
