"""Buffers: where they start, how they are mixed, averaged and estimated anew."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, on_ranks
from replicas import assert_equal_states, gathered
from small_runs import SGD
from torch import nn

from gossip import GossipDataParallel, GossipError
from topologies import build

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "of_")


class Counting(nn.Module):
    """Buffers of many dtypes, one replaced and one written in place in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        for dtype in FLOATS:
            self.register_buffer(name_of(dtype), torch.zeros(2, 3, dtype=dtype).t())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1 + dist.get_rank()
        for dtype in FLOATS:
            name = name_of(dtype)
            if dtype == torch.float32:
                self.of_float32 = self.of_float32 + dist.get_rank()
            else:
                getattr(self, name).add_(dist.get_rank())
        return self.layer(x)


@pytest.mark.parametrize("algorithm", ["adapt_while_communicating", "adapt_then_combine"])
@on_ranks(4)
def test_buffers_are_mixed_in_every_step_if_so_wished(algorithm: str) -> None:
    model = GossipDataParallel(Counting(), SGD, "ring", buffers="average", algorithm=algorithm)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
    model.state_dict()
    matrix = torch.from_numpy(build("ring", 4).round(0).matrix())
    x = torch.zeros(4, dtype=torch.float64)
    added = torch.arange(4, dtype=torch.float64)
    for step in range(3):
        combined_first = x if step == 0 else matrix @ x  # sent after the forward pass, combined a step later
        x = matrix @ (x + added) if algorithm == "adapt_then_combine" else combined_first + added
    for dtype in FLOATS:
        buffer = model.module.get_buffer(name_of(dtype))
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
        torch.testing.assert_close(buffer.real.double(), x[model.rank].expand(3, 2), rtol=tolerance, atol=1e-6)
        assert buffer.dtype == dtype
    assert model.module.calls == (3, 6, 9, 12)[model.rank]  # integers are never mixed


@pytest.mark.parametrize(
    ("how", "text"), [("gone", "buffer 'of_float64' is gone"), ("size", "is now torch.float64 [7]")]
)
@on_ranks(2)
def test_mixed_buffer_that_changed_is_named(how: str, text: str) -> None:
    model = GossipDataParallel(Counting(), SGD, "ring", buffers="average")
    model(torch.ones(1, 3)).sum().backward()
    if how == "gone":
        del model.module.of_float64
    else:
        model.module.of_float64 = torch.zeros(7, dtype=torch.float64)
    assert text in error_of(GossipError, model.idle_step)


# ------------------------------------------------------------------ batch norm


def batches(rank: int) -> list[torch.Tensor]:
    """A different number on each rank; rank 2 has none."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 3, generator=generator) * (1 + rank) + rank for _ in range((2, 3, 0)[rank])]


@on_ranks(3)
def test_statistics_are_estimated_for_the_average_from_all_ranks_batches() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    model = GossipDataParallel(module, SGD, "complete")
    for step in range(3):
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(50 + model.rank + step))).sum().backward()
    before = copy.deepcopy(model.state_dict())
    model.train()
    with model.averaged(recalibrate=[(batch, "label") for batch in batches(model.rank)]):
        reference = copy.deepcopy(model.module).eval()
        norm = reference[2]
        seen = [reference[0](batch) for rank in range(3) for batch in batches(rank)]
        mean = torch.stack([each.mean(0) for each in seen]).mean(0)
        variance = torch.stack([each.var(0) for each in seen]).mean(0)
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close(norm.running_var, variance)
        assert torch.equal(gathered(norm.running_var)[0], norm.running_var)
        assert model.training
        assert model.module[2].momentum == 0.1
    assert_equal_states(model.state_dict(), before)
    with pytest.raises(ValueError, match="recalibrate has no batch on any rank"), model.averaged(recalibrate=[]):
        pass
    assert_equal_states(model.state_dict(), before)
    model(torch.ones(4, 3)).sum().backward()
