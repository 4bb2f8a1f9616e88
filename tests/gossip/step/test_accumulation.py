"""Several forwards and backwards to a step, and none at all."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from listening import logged
from ranks import run_ranks
from small_runs import MODES, TINY_BUCKETS, finish
from torch import nn
from torch.utils.checkpoint import checkpoint

from gossip import GossipDataParallel

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def wrap(module: nn.Module, mode: str) -> GossipDataParallel:
    return GossipDataParallel(module, SGD, "ring", bucket_cap_mb=TINY_BUCKETS, **MODES[mode])


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, actual), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_equals_one_large_batch(mode: str) -> None:
    module = make_module().eval()  # batch norm would see the micro-batches
    plain, model = copy.deepcopy(module), wrap(module, mode)
    optimizer = SGD(plain.parameters())
    for step in range(3):
        batch = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        plain(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        *first, last = batch.split(4)
        with model.no_sync():
            for each in first:
                (model(each).square().mean() / 3).backward()
        (model(last).square().mean() / 3).backward()
        finish(model)
    assert model.step == 3
    assert_same(model, plain)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_pipeline_schedule_runs_backwards_in_any_order(mode: str, order: tuple[int, ...]) -> None:
    module = make_module()
    plain, model = copy.deepcopy(module), wrap(module, mode)
    batches = torch.randn(3, 5, 4, dtype=torch.float64)
    for each in batches:
        plain(each).square().mean().backward()
    SGD(plain.parameters()).step()
    losses = [model(each).square().mean() for each in batches]
    for position, index in enumerate(order):
        if position < 2:
            with model.no_sync():
                losses[index].backward()
        else:
            losses[index].backward()
    finish(model)
    assert model.step == 1
    assert_same(model, plain)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for part in chosen:
            x = torch.tanh(self.parts[part](x))
        return x


@pytest.mark.parametrize("mode", MODES)
def test_gradients_from_no_sync_alone_are_applied_and_nothing_leaks(mode: str) -> None:
    """A part that is used only in the first micro-batch, and parts that are used in some steps only."""
    plain, model = Branches(), wrap(Branches(), mode)
    optimizer = SGD(plain.parameters())
    x = torch.ones(2, 4, dtype=torch.float64)
    for first, last in [((0,), (1,)), ((2, 1), (2,)), ((1,), (0, 2)), ((0, 1), (0,))]:
        for module in (plain, model):
            with model.no_sync():
                module(x, first).sum().backward()
            module(x, last).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        finish(model)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(model, plain)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_frozen_batch_norm_and_checkpointing_train(mode: str, use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make_module(), nn.Linear(3, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=use_reentrant)
            return self.second(hidden)

    module = Checkpointed()
    module.first[2].eval()  # in a model in train mode
    plain, model = copy.deepcopy(module), wrap(module, mode)
    optimizer = SGD(plain.parameters())
    for step in range(3):
        for each in (plain, model):
            each(torch.full((4, 4), 0.1 * step, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        finish(model)
    assert model.step == 3
    assert_same(model, plain)


@pytest.mark.parametrize("mode", MODES)
def test_freezing_and_unfreezing_in_mid_training(mode: str) -> None:
    module = make_module().eval()
    module[0].requires_grad_(False)
    plain, model = copy.deepcopy(module), wrap(module, mode)
    optimizer = SGD(plain.parameters())
    for step in range(6):
        for each in (plain, model.module):
            each[0].weight.requires_grad_(step >= 2)  # late unfrozen, then frozen again
            each[0].bias.requires_grad_(step == 3)
            each[3].requires_grad_(step not in (3, 4))
            if step == 4:
                each[0].weight.requires_grad_(False)
                each[3].bias.requires_grad_(True)
        for each in (plain, model):
            each(torch.full((4, 4), 0.1 * step, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        finish(model)
    assert model.step == 6
    assert_same(model, plain)


def unfreeze_with_peers() -> list[list[float]]:
    module = make_module()
    module.requires_grad_(False)
    module[3].bias.requires_grad_(True)
    model = GossipDataParallel(module, SGD, "complete", bucket_cap_mb=TINY_BUCKETS)
    for step in range(4):
        if step == 2:
            module[3].bias.requires_grad_(False)
            module[0].weight.requires_grad_(True)  # now the only one, in a bucket that was frozen
        generator = torch.Generator().manual_seed(10 * model.rank + step)
        model(torch.randn(4, 4, generator=generator, dtype=torch.float64)).square().mean().backward()
    assert model.step == 4
    model.global_avg()
    values = [parameter.flatten().tolist() for parameter in model.parameters()]
    model.close()
    return values


def test_every_parameter_is_mixed_whatever_is_frozen() -> None:
    first, second = run_ranks(unfreeze_with_peers, world_size=2)
    assert first == second
    start = [parameter.flatten().tolist() for parameter in make_module().parameters()]
    assert first[0] != start[0]  # 0.weight
    assert first[-1] != start[-1]  # 3.bias
    assert first[1] == start[1]  # 0.bias never trained


# ------------------------------------------------------------------ without no_sync


def backward(model: GossipDataParallel, times: int = 1) -> None:
    for _ in range(times):
        model(torch.ones(3, 4, dtype=torch.float64)).square().mean().backward()


def accumulate_as_plain_ddp_allows(model: GossipDataParallel) -> None:
    for _ in range(3):
        backward(model, 4)
        model.optimizer.step()
        model.optimizer.zero_grad()


def step_after_each_backward(model: GossipDataParallel) -> None:
    for _ in range(4):
        backward(model)
        model.optimizer.step()
        model.optimizer.step()  # and once more, for a scheduler's sake


def never_call_step(model: GossipDataParallel) -> None:
    backward(model, 5)


def accumulate_under_no_sync(model: GossipDataParallel) -> None:
    for _ in range(2):
        with model.no_sync():
            backward(model, 3)
        backward(model)
        model.optimizer.step()


def idle_and_join(model: GossipDataParallel) -> None:
    for _ in range(2):
        with model.join():
            backward(model)
            model.optimizer.step()
        model.idle_step()
        model.idle_step()
        backward(model)
        model.optimizer.step()


LOOPS: dict[str, tuple[Callable[[GossipDataParallel], None], int]] = {
    "as plain DDP allows": (accumulate_as_plain_ddp_allows, 1),
    "step after each backward": (step_after_each_backward, 0),
    "never called": (never_call_step, 0),
    "no_sync": (accumulate_under_no_sync, 0),
    "idle steps and join": (idle_and_join, 0),
}


def warnings_of(loop: Callable[[GossipDataParallel], None], model: GossipDataParallel) -> list[str]:
    with logged() as lines, model:
        loop(model)
    return lines


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", LOOPS)
def test_steps_that_were_meant_to_be_one_are_pointed_out_once(loop: str, mode: str) -> None:
    run, num_warnings = LOOPS[loop]
    lines = warnings_of(run, wrap(make_module(), mode))
    assert len(lines) == (0 if mode == "outside" else num_warnings)
    for line in lines:
        assert "rank 0: step 4: 4 steps were made since the last optimizer.step(), one by each backward pass" in line
        assert "put all but the last backward pass under no_sync(), or wrap the module with step_in_backward" in line


def gradients_of(model: GossipDataParallel) -> list[torch.Tensor]:
    loss = model(torch.ones(3, 4, dtype=torch.float64)).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def write_gradients(model: GossipDataParallel) -> None:
    for _ in range(3):
        for parameter, gradient in zip(model.parameters(), gradients_of(model), strict=True):
            parameter.grad = gradient
        model.optimizer.step()
        model.optimizer.zero_grad()


def transform_a_function(model: GossipDataParallel) -> None:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model.module, parameters, (torch.ones(3, 4).double(),)).square().mean()

    model.eval()
    backward(model)
    model.optimizer.step()
    for _ in range(2):
        for name, gradient in torch.func.grad(loss)(dict(model.named_parameters())).items():
            model.get_parameter(f"module.{name}").grad = gradient.detach()
        model.optimizer.step()


def accumulate_only(model: GossipDataParallel) -> None:
    for _ in range(2):
        with model.no_sync():
            backward(model, 2)
        model.optimizer.step()


STEPLESS = {
    "gradients written": (write_gradients, 0),
    "torch.func": (transform_a_function, 1),
    "only under no_sync": (accumulate_only, 0),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", STEPLESS)
def test_gradients_of_which_no_step_is_made_are_pointed_out_once(loop: str, mode: str) -> None:
    run, num_steps = STEPLESS[loop]
    model = wrap(make_module(), mode)
    lines = warnings_of(run, model)
    assert len(lines) == (0 if mode == "outside" else 1)
    assert model.step == (num_steps if lines else 3 if loop != "only under no_sync" else 2)
    for line in lines:
        assert f"rank 0: step {num_steps}: optimizer.step() did nothing: there are gradients" in line
        assert "outside of no_sync(); have the last one of each step there" in line
        assert "torch.autograd.grad, torch.func, gradient surgery), wrap the module with step_in_backward=False" in line


def test_an_optimizer_that_was_stepped_in_turn_is_not_blamed() -> None:
    def loop(model: GossipDataParallel) -> None:
        backward(model)
        for optimizer in model.optimizer:
            optimizer.step()
        model.module[0].weight.grad = torch.ones(6, 4, dtype=torch.float64)  # which the next backward pass adds to
        backward(model)
        for optimizer in model.optimizer:
            optimizer.step()

    module = make_module()
    model = GossipDataParallel(module, (SGD(module[0].parameters()), SGD(module[3].parameters())))
    assert warnings_of(loop, model) == []


@pytest.mark.parametrize("in_turns", [True, False])
def test_two_losses_with_two_optimizers_are_pointed_out_where_both_come_first(in_turns: bool) -> None:
    def loop(model: GossipDataParallel) -> None:
        for _ in range(2):
            for optimizer in model.optimizer:
                backward(model)
                if in_turns:
                    optimizer.step()
            if not in_turns:
                for optimizer in model.optimizer:
                    optimizer.step()

    module = make_module()
    model = GossipDataParallel(module, (SGD(module[0].parameters()), SGD(module[3].parameters())))
    lines = warnings_of(loop, model)
    assert ["2 steps were made" in line for line in lines] == ([] if in_turns else [True])
