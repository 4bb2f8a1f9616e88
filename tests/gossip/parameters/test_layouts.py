"""Every kind of parameter that a module may hold, trained beside plain torch and mixed among ranks."""

import functools
from typing import Any

import pytest
import torch
from replicas import Awkward
from small_runs import TINY_BUCKETS, finish
from torch import nn

from gossip import GossipDataParallel

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Layouts(Awkward):
    """And channels_last in 3d, elements with gaps between them, float64, one parameter of many buckets' size."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Conv3d(2, 2, 2).to(memory_format=torch.channels_last_3d)
        self.strided = nn.Parameter(torch.randn(6, 8)[::2, ::2])
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(300))
        self.sevens = nn.ParameterList([nn.Parameter(torch.randn(7)) for _ in range(11)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = super().forward(x).square().mean() + self.volume(x.view(1, 2, 2, 2, 3)).square().mean()
        total = total + self.strided.cos().sum() + self.wide.square().sum() + self.large.square().mean()
        for each in self.sevens:
            total = total * (1 + 0.01 * each.tanh().sum())
        return total


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("bucket_cap_mb", [TINY_BUCKETS, 25])
@pytest.mark.parametrize("mode", [{}, {"clip_grad_norm": 1e9}, {"step_in_backward": False}])
def test_every_layout_trains_as_in_plain_torch(bucket_cap_mb: float, mode: dict) -> None:
    plain, module = Layouts(), Layouts()
    strides = [parameter.stride() for parameter in module.parameters()]
    optimizer = SGD(plain.parameters())
    model = GossipDataParallel(module, SGD, bucket_cap_mb=bucket_cap_mb, **mode)
    for step in range(4):
        plain(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(batch(step)).backward()
        finish(model)
    for (name, actual), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual, wanted), name
    assert [parameter.stride() for parameter in module.parameters()] == strides


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda _: torch.zeros(2, dtype=torch.complex64), "has the dtype torch.complex64; only float64, .*float16"),
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
