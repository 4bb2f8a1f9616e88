"""Every kind of parameter that a module may hold, trained beside plain torch and mixed among ranks."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from ranks import run_ranks
from replicas import gathered
from torch import nn

from gossip import GossipDataParallel

SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
TINY_BUCKETS = 71 / 2**20


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
        if not model._arguments.step_in_backward:
            model.optimizer.step()
            model.optimizer.zero_grad()
    for (name, actual), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(actual, wanted), name
    assert [parameter.stride() for parameter in module.parameters()] == strides


def mix_layouts(algorithm: str) -> None:
    model = GossipDataParallel(Layouts(), SGD, "complete", bucket_cap_mb=TINY_BUCKETS, algorithm=algorithm)
    start = copy.deepcopy(model.state_dict())
    for step in range(3):
        model(images(step, model.rank)).backward()
    for _ in range(2):
        model.idle_step()  # u = 0 on the complete graph: all replicas are equal now
    state = model.state_dict()
    for name, value in state.items():
        everyone = gathered(value)
        torch.testing.assert_close(
            everyone, everyone[:1].expand_as(everyone), rtol=2e-2 if name == "low" else 1e-5, atol=1e-6
        )
        assert value.numel() == 0 or not torch.equal(value, start[name]), name
    model.close()


@pytest.mark.parametrize("algorithm", ["adapt_while_communicating", "adapt_then_combine"])
def test_every_layout_is_mixed(algorithm: str) -> None:
    run_ranks(mix_layouts, algorithm, world_size=3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("factory", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients_train_as_in_plain_torch(factory: type[torch.optim.Optimizer]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Embedding(10, 4, sparse=True)

    plain, model = make(), GossipDataParallel(make(), lambda named: factory([p for _, p in named], lr=0.1))
    optimizer = factory(plain.parameters(), lr=0.1)
    for step in range(3):
        for each in (plain, model):
            each(torch.tensor([1, step, 7, 7])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.module.weight, plain.weight)
    assert model.grad_norm > 0


def test_sparse_gradients_with_clipping_are_refused() -> None:
    with pytest.raises(ValueError, match="module 'words' has sparse=True"):
        GossipDataParallel(nn.ModuleDict({"words": nn.Embedding(3, 2, sparse=True)}), SGD, clip_grad_norm=1.0)


def make_refused(kind: str) -> nn.Module:
    module = nn.Module()
    module.ok = nn.Parameter(torch.zeros(3))
    shared = torch.zeros(6)
    bad = {
        "complex": lambda: nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
        "meta": lambda: nn.Parameter(torch.zeros(2, device="meta")),
        "lazy": lambda: nn.UninitializedParameter(),
        "overlapping": lambda: nn.Parameter(torch.zeros(3).expand(2, 3)),
        "sparse": lambda: nn.Parameter(torch.eye(3).to_sparse()),
        "shared": lambda: nn.Parameter(shared[1:4]),
    }
    module.shared = nn.Parameter(shared[:3]) if kind == "shared" else None
    module.bad = bad[kind]()
    return module


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("complex", "parameter 'bad' has the dtype torch.complex64; only float64, float32, bfloat16 and float16"),
        ("meta", "parameter 'bad' is on the meta device"),
        ("lazy", "parameter 'bad' is lazy; run one forward before"),
        ("overlapping", "parameter 'bad' overlaps itself in memory"),
        ("sparse", "parameter 'bad' has the layout torch.sparse_coo"),
        ("shared", "are two Parameters over the same memory; to tie them"),
    ],
)
def test_parameter_that_cannot_be_mixed_is_refused_with_the_reason(kind: str, text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- its text is compared
        GossipDataParallel(make_refused(kind), None)
    assert text in str(caught.value)
