"""One optimizer over the stacks updates each replica as its own would, clipped alike, without what is not finite."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from separate import ADAM, Separate, assert_same, batch, make_module, make_workers, train, train_both, trained_alike
from torch import nn

from gossip import AccumAdamW, GossipError, VirtualWorkers
from gossip.optimizers.scopes import Scope, known_scope_of, scope_of
from gossip.virtual.stacked_optimizers import build_stacked_optimizers, step_all


class Lamb(torch.optim.Optimizer):
    """Scales the update of a parameter, which its steps make smaller, by the norms of all that it ``norms_of``."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def norms_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        return [parameter]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                count = self.state[parameter].setdefault("step", torch.zeros(()))
                count += 1
                total = self.state[parameter].setdefault("total", torch.zeros_like(parameter)).add_(parameter.grad)
                norm = sum(float(each.norm()) for each in self.norms_of(parameter))
                parameter.add_(total, alpha=-group["lr"] * norm / float(count * total.norm().clamp(min=1e-9)))


class Counting(Lamb):
    """Counts in its groups."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


class Novo(Lamb):
    """Keeps one number for each parameter."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("square", torch.zeros(())).add_(parameter.grad.norm())
        super().step()


class Batched(Lamb):
    """Takes stacks of matrices, too, each of them by itself."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    left, _, right = torch.linalg.svd(parameter.grad, full_matrices=False)
                    parameter.sub_(left @ right, alpha=group["lr"])


class ById(Lamb):
    """Knows its parameters by their ids."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.known = {id(each): 1 for group in self.param_groups for each in group["params"]}

    def norms_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        return [parameter] * self.known[id(parameter)]


class OneNorm(Lamb):
    def norms_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        del parameter
        return [each for group in self.param_groups for each in group["params"]]


Muon = functools.partial(torch.optim.Muon, lr=0.1)
OPTIMIZERS: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
    "Adam tensor lr": functools.partial(torch.optim.Adam, lr=torch.tensor(0.01)),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "AccumAdamW": functools.partial(AccumAdamW, lr=0.01, weight_decay=0.1, accum_iter=2),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.01),
    "zero learning rate": functools.partial(torch.optim.AdamW, lr=0.0),
    "Lamb": Lamb,
}


class WithScalar(nn.Module):
    """Also a parameter without dimensions, whose state has the shape of a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.inner = make_module()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs) * self.scale


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_each_replica_as_its_own(name: str) -> None:
    trained_alike(WithScalar().double(), 3, OPTIMIZERS[name], num_steps=4, atol=1e-9)


def test_muon_steps_over_matrices_of_each_replica_bit_for_bit() -> None:
    bare, *apart = (nn.Parameter(torch.randn(4, 5)) for _ in range(4))
    stack = nn.Parameter(torch.stack([each.detach() for each in apart]))
    module = nn.ParameterList([bare])
    optimizers = build_stacked_optimizers(Muon([bare]), module, {id(bare): (stack,)})
    separate, calls = Muon(apart), list[object]()
    optimizers[0].register_step_pre_hook(lambda *_: calls.append(torch.equal(stack, torch.stack(apart))))
    optimizers[0].register_step_post_hook(lambda *_: calls.append(not torch.equal(stack, torch.stack(apart))))
    for _ in range(3):
        stack.grad = torch.randn(3, 4, 5)
        for parameter, gradient in zip(apart, stack.grad, strict=True):
            parameter.grad = gradient.clone()
        step_all(optimizers)
        separate.step()
        assert torch.equal(stack, torch.stack(apart))
    assert calls == [True] * 6, "hooks before and after each step"


def test_what_an_optimizer_needs_is_found_out_at_any_rate_and_of_any_shape() -> None:
    assert scope_of(Lamb([nn.Parameter(torch.ones(2))], lr=0.0)) is Scope.PARAMETER
    assert scope_of(Batched([nn.Parameter(torch.ones(2))])) is Scope.PARAMETER
    unknown = ById([nn.Parameter(torch.ones(2))])
    with pytest.warns(UserWarning, match=r"ById could not be tried out on small matrices .*: it is taken to .* whole"):
        assert known_scope_of(unknown, Scope.PARAMETER) is Scope.PARAMETER


def test_the_momentum_of_a_replica_that_skips_its_update_stays() -> None:
    workers = make_workers(nn.Linear(3, 3, bias=False).double(), 2, Muon, "ring")
    train(workers, batch(4))
    (before,) = (state["momentum_buffer"].clone() for state in workers.optimizer.state.values())
    spoilt = batch(4)
    spoilt[0] = torch.nan
    train(workers, spoilt)
    ((key, after),) = workers.optimizer.state[next(workers.parameters())].items()
    assert (key, torch.equal(after[0], before[0]), torch.equal(after[1], before[1])) == ("momentum_buffer", True, False)


@pytest.mark.parametrize("name", ["SGD momentum", "AdamW", "AccumAdamW", "Adagrad", "NAdam", "Rprop", "Lamb"])
def test_optimizers_leave_a_replica_without_samples_alone(name: str) -> None:
    """From where all have been updated once: an optimizer's counters are common to all replicas."""
    module = make_module()
    optimizer = functools.partial(OPTIMIZERS[name], lr=0.05)
    workers = make_workers(module, 3, optimizer, "ring")
    train(workers, batch(6))
    states = [copy.deepcopy(dict(state)) for state in workers.optimizer.state.values()]
    mixed = torch.tensordot(
        torch.from_numpy(workers.topology.round(0).matrix()), next(workers.parameters()).detach().clone(), 1
    )
    train(workers, batch(2))
    torch.testing.assert_close(next(workers.parameters())[2].detach(), mixed[2], rtol=0, atol=1e-12)
    for before, state in zip(states, workers.optimizer.state.values(), strict=True):
        for key, value in before.items():
            if isinstance(value, torch.Tensor) and value.dim():
                assert torch.equal(state[key][2], value[2]), key


def test_groups_by_dimensions_see_the_bare_shapes() -> None:
    def by_dimensions(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        matrices = [each for each in named if each[1].ndim >= 2]
        vectors = [each for each in named if each[1].ndim < 2]
        assert [len(matrices), len(vectors)] == [2, 2]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}])

    trained_alike(make_module(), 3, by_dimensions)


@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "Adagrad", "NAdam", "Lamb"])
def test_an_optimizer_that_has_trained_goes_on(name: str) -> None:
    module = WithScalar().double()
    built = OPTIMIZERS[name](module.parameters())
    for step in range(2):
        built.zero_grad()
        module(batch(4, seed=step)).square().mean().backward()
        built.step()
    built.zero_grad()

    def trained(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = OPTIMIZERS[name]([each for _, each in named])
        optimizer.load_state_dict(copy.deepcopy(built.state_dict()))
        return optimizer

    separate = Separate(module, 3, trained)
    workers = VirtualWorkers(module, 3, built, devices=["cpu"])
    assert workers.optimizer is built
    for step in range(3):
        train_both(workers, separate, batch(6, seed=step))
    assert_same(workers, separate, atol=1e-9)


REFUSED: dict[str, tuple[Any, str]] = {
    "a norm of all parameters": (OneNorm, "optimizer OneNorm cannot update .*: it looks at several parameters at once"),
    "state of other shapes": (
        functools.partial(torch.optim.Adafactor, lr=0.1),
        "optimizer Adafactor .*'row_var', which is not one value",
    ),
    "a counter in groups": (Counting, "optimizer Counting .* keeps 'steps', which is not one value"),
    "a number of each parameter": (Novo, "optimizer Novo .* keeps 'square', which is not one value"),
    "a look-up by parameter": (ById, "optimizer ById cannot update"),
    "SparseAdam": (functools.partial(torch.optim.SparseAdam, lr=0.1), "optimizer SparseAdam .*dense gradients"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_for_which_replicas_cannot_be_stacked_are_refused(name: str) -> None:
    optimizer, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        make_workers(make_module(), 3, optimizer)


def clip_all(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def clip_each(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            nn.utils.clip_grad_norm_([parameter], 0.05)


@pytest.mark.parametrize(("clip", "reference"), [("global", clip_all), ("bucket", clip_each)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_clipping_equals_torchs(dtype: torch.dtype, clip: str, reference: Callable[[nn.Module], object]) -> None:
    sizes = torch.tensor([10.0, 1e-3, 1.0]).repeat_interleave(2)[:, None].to(dtype)
    trained_alike(
        make_module().to(dtype),
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        inputs=lambda step: batch(6, seed=step).to(dtype) * sizes,
        atol={torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype],
        clip_separate=reference,
        clip_grad_norm=0.05,
        clip=clip,
        bucket_cap_mb=1e-6,  # a bucket for every parameter
    )


@pytest.mark.parametrize("clipping", [{}, {"clip_grad_norm": 1e9}, {"clip_grad_norm": 1e9, "clip": "bucket"}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_are_not_applied(value: float, clipping: dict[str, Any]) -> None:
    module = make_module()
    workers, separate = make_workers(module, 3, ADAM, **clipping), Separate(module, 3, ADAM)
    train_both(workers, separate, batch(6))
    inputs = batch(6, seed=1)
    inputs[2:4] = value
    train(workers, inputs)
    separate.backward(inputs)
    separate.update((0, 2))
    assert_same(workers, separate)
    stats = workers.stats()
    assert (stats.step, stats.num_skipped, stats.num_refused) == (1, 1, 0)


def test_one_bad_bucket_leaves_the_others() -> None:
    """As the wrapper, which updates bucket by bucket."""
    module = make_module()
    workers = make_workers(module, 2, bucket_cap_mb=1e-6)
    before = {name: each.detach().clone() for name, each in workers.named_parameters()}
    (name, stack), *_ = workers.named_parameters()
    stack.register_hook(lambda gradient: torch.where(torch.arange(2).view(2, 1, 1) == 1, math.inf, gradient))
    train(workers, batch(4))
    for other, values in workers.named_parameters():
        changed = (values != before[other]).flatten(1).any(1).tolist()
        assert changed == ([True, False] if other == name else [True, True]), other


def test_messages_that_are_not_finite_are_refused_and_a_spoilt_replica_is_an_error() -> None:
    workers = make_workers(make_module(), 4, topology="directed_ring")
    train(workers, batch(8))
    with torch.no_grad():
        next(workers.parameters())[2] = math.nan
    train(workers, batch(8))  # the message that is mixed now left before
    with pytest.raises(GossipError, match=r"rank 2: step 2, bucket .*its own parameters are corrupted"):
        train(workers, batch(8))
