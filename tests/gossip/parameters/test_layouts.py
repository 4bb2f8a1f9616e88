"""Every kind of parameter that a module may hold, trained beside plain torch and mixed among ranks."""

import functools
from typing import Any

import pytest
import torch
from small_runs import TINY_BUCKETS, finish
from torch import nn

from gossip import GossipDataParallel

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Layouts(nn.Module):
    """channels_last in 2d and 3d, strides, no elements, several dtypes, one parameter of many buckets' size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.planes = nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.volume = nn.Conv3d(2, 2, 2).to(memory_format=torch.channels_last_3d)
        self.transposed = nn.Parameter(torch.randn(7, 5).t())
        self.strided = nn.Parameter(torch.randn(6, 8)[::2, ::2])
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.low = nn.Parameter(torch.randn(9).to(torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(300))
        self.sevens = nn.ParameterList([nn.Parameter(torch.randn(7)) for _ in range(11)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.planes(x.to(memory_format=torch.channels_last)).square().mean()
        total = total + self.volume(x[:, :2, None].expand(-1, -1, 2, -1, -1)).square().mean()
        total = total + (self.transposed.sin().sum() + self.strided.cos().sum() + self.empty.sum()) * self.scalar
        total = total + self.low.float().square().sum() + self.wide.square().sum() + self.large.square().mean()
        for each in self.sevens:
            total = total * (1 + 0.01 * each.tanh().sum())
        return total


def images(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(10 * rank + step))


@pytest.mark.parametrize("bucket_cap_mb", [TINY_BUCKETS, 25])
@pytest.mark.parametrize("mode", [{}, {"clip_grad_norm": 1e9}, {"step_in_backward": False}])
def test_every_layout_trains_as_in_plain_torch(bucket_cap_mb: float, mode: dict) -> None:
    plain, module = Layouts(), Layouts()
    strides = [parameter.stride() for parameter in module.parameters()]
    optimizer = SGD(plain.parameters())
    model = GossipDataParallel(module, SGD, bucket_cap_mb=bucket_cap_mb, **mode)
    for step in range(4):
        plain(images(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(images(step)).backward()
        finish(model)
    for (name, actual), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual, wanted), name
    assert [parameter.stride() for parameter in module.parameters()] == strides


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda _: torch.zeros(2, dtype=torch.complex64),
            "has the dtype torch.complex64; only float64, .*float16",
        ),
        (lambda _: torch.zeros(2, device="meta"), "is on the meta device"),
        (lambda _: nn.UninitializedParameter(), "is lazy; run one forward before"),
        (lambda _: torch.zeros(3).expand(2, 3), "overlaps itself in memory"),
        (lambda _: torch.eye(3).to_sparse(), "has the layout torch.sparse_coo"),
        (lambda ok: ok.data[1:], "are two Parameters over the same memory; to tie them"),
    ],
)
def test_parameter_that_cannot_be_mixed_is_refused_with_the_reason(make: Any, text: str) -> None:
    ok = nn.Parameter(torch.zeros(3))
    bad = make(ok)
    module = nn.ParameterDict({"ok": ok, "bad": bad if isinstance(bad, nn.Parameter) else nn.Parameter(bad)})
    with pytest.raises(ValueError, match=f"parameters? .*'bad' {text}"):
        GossipDataParallel(module, None)
