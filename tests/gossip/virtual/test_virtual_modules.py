"""Modules of all kinds, vectorised or run one after the other, train as they do apart."""

from collections.abc import Callable

import pytest
import torch
from separate import Separate, assert_same, batch, make_workers, stacked, train, train_both, trained_alike
from torch import nn
from torch.utils.checkpoint import checkpoint

from gossip.lab.experiments.models import CharTransformer, SmallCNN


class Last(nn.Module):
    """The output of a recurrent layer's last time step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)[0][:, -1]


class Replacing(nn.Module):
    """Puts other tensors in the place of its buffers, writes one in place, and keeps its output as many modules do."""

    output: torch.Tensor
    seen: torch.Tensor
    total: torch.Tensor
    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(2))
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("unused", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.output = self.layer(inputs)
        self.seen = self.seen + len(inputs)
        self.total = self.total + self.output.detach().sum(0)
        self.kept.add_(inputs.detach().sum(0))
        return self.output


class Branching(Replacing):
    """Looks at values, which vmap cannot."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs)
        if output.detach().sum().item() > 0:
            output = 2 * output
        return output + nn.functional.dropout(output, 0.5, self.training)


class Routing(nn.Module):
    """Each replica uses the one or the other layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.first(inputs) if inputs.sum().item() > 0 else self.second(inputs)


class Checkpointing(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        def inner(hidden: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(hidden))

        hidden = checkpoint(inner, self.first(inputs), use_reentrant=self.use_reentrant)
        return self.last(hidden)


def images(num_samples: int, seed: int) -> torch.Tensor:
    return batch(num_samples, 3, 4, 4, seed=seed)


def vectors(num_samples: int, seed: int) -> torch.Tensor:
    return batch(num_samples, seed=seed)


def texts(num_samples: int, seed: int) -> torch.Tensor:
    return batch(num_samples, 6, 3, seed=seed)


def indices(num_samples: int, seed: int) -> torch.Tensor:
    return torch.randint(5, (num_samples, 4), generator=torch.Generator().manual_seed(seed))


VECTORISED: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], torch.Tensor]]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), vectors),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten()), images),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 2)), indices),
    "SmallCNN": (lambda: SmallCNN((3, 4, 4), 5, channels=(4, 6)), images),
    "CharTransformer": (lambda: CharTransformer((4,), 5, width=8, depth=2, num_heads=2, tied_head=True), indices),
    "one layer in two places": (
        lambda: nn.Sequential(*2 * [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))]),
        vectors,
    ),
    "replaced buffers": (Replacing, vectors),
}
ONE_BY_ONE = {
    "GRU": (lambda: Last(nn.GRU(3, 4, num_layers=2, batch_first=True)), texts),
    "batch norm with plain means": (lambda: nn.BatchNorm1d(3, momentum=None), vectors),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), vectors),
    "data-dependent control flow": (lambda: Branching().eval(), vectors),
    "a layer that some replicas leave out": (Routing, vectors),
    "checkpoint": (lambda: Checkpointing(use_reentrant=False), vectors),
    "reentrant checkpoint": (lambda: Checkpointing(use_reentrant=True), vectors),
}


@pytest.mark.parametrize(
    ("case", "world_size", "num_devices"),
    [*((case, 3, 1) for case in (*VECTORISED, *ONE_BY_ONE)), ("batch norm", 1, 1), ("GRU", 1, 1), ("GRU", 5, 2)],
)
def test_training_equals_modules_apart(case: str, world_size: int, num_devices: int, warnings_told: list[str]) -> None:
    make, inputs = (VECTORISED | ONE_BY_ONE)[case]
    torch.manual_seed(0)
    num_samples, devices = 3 * world_size - (world_size > 1), ["cpu"] * num_devices
    workers = trained_alike(
        make().double(), world_size, inputs=lambda step: inputs(num_samples, step), atol=1e-10, devices=devices
    )
    assert workers.is_vectorised == (case in VECTORISED)
    assert len(warnings_told) == (case not in VECTORISED)
    if warnings_told:
        assert "cannot be vectorised over the replicas, which run one after the other" in warnings_told[0]


@pytest.mark.parametrize("case", ["batch norm", "SmallCNN", "batch norm with plain means"])
def test_evaluation_uses_each_replicas_own_statistics(case: str) -> None:
    make, inputs = (VECTORISED | ONE_BY_ONE)[case]
    torch.manual_seed(0)
    module = make().double()
    workers, separate = make_workers(module, 3), Separate(module, 3)
    for step in range(3):
        train_both(workers, separate, inputs(6, step))
    workers.eval()
    wanted = [each.eval()(inputs(5, 9)) for each in separate.modules]
    torch.testing.assert_close(workers.every(inputs(5, 9)), torch.stack(wanted), rtol=1e-9, atol=1e-9)
    assert_same(workers, separate, atol=1e-10)  # nothing was written by looking
    workers.train()
    train(workers, inputs(6, 4))
    for each in separate.modules:
        each.train()
    separate.train(inputs(6, 4))
    assert_same(workers, separate, atol=1e-10)


def test_dropout_differs_between_replicas() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    workers = make_workers(nn.Sequential(linear, nn.Dropout(0.5)), 4)
    ones = torch.ones(4, 64)
    masks = workers(ones) != 0
    assert workers.is_vectorised
    assert len({tuple(each.tolist()) for each in masks}) == 4
    assert 0.3 < float(masks.double().mean()) < 0.7
    same = workers.every(ones[:1])
    assert len({tuple(each.flatten().tolist()) for each in same}) == 4, "also of inputs that are the same for all"
    torch.manual_seed(1)
    first = workers(ones)
    torch.manual_seed(1)
    assert torch.equal(workers(ones), first)
    torch.testing.assert_close(workers.eval()(ones), linear(ones))


class Forgetful(nn.Linear):
    """Draws, and keeps what it computed in plain attributes; its calls are of one replica in the end."""

    num_calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.latest = super().forward(input) + torch.rand(())
        return self.latest if float(self.latest.detach().sum()) > 0 else -self.latest


def test_a_failed_attempt_leaves_no_trace() -> None:
    trained = []
    for is_vectorised in (True, False):
        torch.manual_seed(1)
        workers = make_workers(Forgetful(3, 2).double(), 3)
        workers._calls.is_vectorised = is_vectorised
        train(workers, batch(6))
        assert not workers.is_vectorised
        assert workers.module.num_calls == 0
        assert not hasattr(workers.module, "latest")
        trained.append(stacked(workers))
    torch.testing.assert_close(*trained, rtol=0, atol=0)


@pytest.mark.parametrize("case", ["vectorised", "one by one"])
def test_a_users_mistake_is_his_own_error_and_changes_nothing(case: str, warnings_told: list[str]) -> None:
    module = (nn.Linear(3, 2) if case == "vectorised" else Branching()).double()
    workers = make_workers(module, 3)
    if case == "one by one":
        train(workers, batch(6))
    is_vectorised, num_notices = workers.is_vectorised, len(warnings_told)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(2x5 and 3x2\)"):
        workers(batch(6, 5))
    assert workers.is_vectorised == is_vectorised == (case == "vectorised")
    assert len(warnings_told) == num_notices
    train(workers, batch(6))
    assert workers.is_vectorised == is_vectorised


def test_modules_part_by_part_in_evaluation_mode(warnings_told: list[str]) -> None:
    """A frozen batch norm inside of a model that trains, also where copies run."""
    torch.manual_seed(0)
    for make in (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        lambda: nn.Sequential(Branching().eval(), nn.BatchNorm1d(2)),
    ):
        module = make().double()
        workers, separate = make_workers(module, 3), Separate(module, 3)
        for step in range(3):
            workers.module[1].train(step != 1)  # type: ignore[index]
            for each in separate.modules:
                each[1].train(step != 1)  # type: ignore[index]
            train_both(workers, separate, batch(6, seed=step))
        assert_same(workers, separate)
    assert len(warnings_told) == 1


def test_an_algorithm_that_directs_gradients_trains_what_is_unfrozen_beside_averaged_buffers() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    module[0].requires_grad_(False)
    workers = make_workers(module, 2, algorithm="gradient_tracking", buffers="average")
    for step in range(4):
        if step == 2:
            assert torch.equal(workers.replica(0)[0].weight, module[0].weight)  # type: ignore[index]
            for stack in workers.parameters():
                stack.requires_grad_(True)
        train(workers, batch(8, seed=step))
    assert not torch.equal(workers.replica(0)[0].weight, module[0].weight)  # type: ignore[index]
