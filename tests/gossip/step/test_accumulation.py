"""Several forwards and backwards to a step, and none at all."""

import copy
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from listening import logged
from replicas import SGD
from small_runs import MODES, TINY_BUCKETS, Branches, assert_same, batch, finish, make_module
from torch import nn

from gossip import GossipDataParallel
from gossip.step.optimizer_step_calls import OptimizerStepCalls


def wrap(module: nn.Module, mode: str) -> GossipDataParallel:
    return GossipDataParallel(module, SGD, "ring", bucket_cap_mb=TINY_BUCKETS, **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_pipeline_schedule_runs_backwards_in_any_order(mode: str, order: tuple[int, ...]) -> None:
    module = make_module()
    plain, model = copy.deepcopy(module), wrap(module, mode)
    batches = [batch(0, step) for step in range(3)]
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
    assert_same(model, plain, 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_from_no_sync_alone_are_applied_and_nothing_leaks(mode: str) -> None:
    """A part that is used only in the first micro-batch, and parts that are used in some steps only."""
    plain, model = Branches(), wrap(Branches(), mode)
    optimizer = SGD(plain.parameters())
    x = batch(0, 0)
    for first, last in [((0,), (1,)), ((2, 1), (2,)), ((1,), (0, 2)), ((0, 1), (0,))]:
        for module in (plain, model):
            with model.no_sync():
                module(x, first).sum().backward()
            module(x, last).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        finish(model)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(model, plain, 1e-12)


# ------------------------------------------------------------------ without no_sync


def backward(model: GossipDataParallel, times: int = 1) -> None:
    for _ in range(times):
        model(batch(0, 0)).square().mean().backward()


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


def write_gradients(model: GossipDataParallel) -> None:
    for _ in range(3):
        gradients = torch.autograd.grad(model(batch(0, 0)).square().mean(), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        model.optimizer.step()
        model.optimizer.zero_grad()


def accumulate_only(model: GossipDataParallel) -> None:
    for _ in range(2):
        with model.no_sync():
            backward(model, 2)
        model.optimizer.step()


def clip_in_between(model: GossipDataParallel) -> None:
    for _ in range(2):
        backward(model)
        nn.utils.clip_grad_norm_((each for each in model.parameters() if each.requires_grad), 1.0)
        model.optimizer.step()
        model.optimizer.zero_grad()


def clip_what_was_accumulated(model: GossipDataParallel) -> None:
    with model.no_sync():
        backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    backward(model)
    model.optimizer.step()


def write_after_backward(model: GossipDataParallel) -> None:
    for _ in range(2):
        backward(model)
        model.module[0].weight.grad = torch.ones(4, 3, dtype=torch.float64)
        model.optimizer.step()


SEVERAL = (
    "rank 0: step 4: 4 steps were made since the last optimizer.step(), one by each backward pass",
    "put all but the last backward pass under no_sync(), or wrap the module with step_in_backward",
)
NONE = (
    "rank 0: step 0: optimizer.step() did nothing: there are gradients",
    "outside of no_sync(); have the last one of each step there",
    "torch.autograd.grad, torch.func, gradient surgery), wrap the module with step_in_backward=False",
)
CLIPPED = (
    "rank 0: step 1: a clip function found no gradients, and clipped nothing",
    "Pass clip_grad_norm= to GossipDataParallel, or wrap the module with step_in_backward=False",
)
WRITTEN = ("rank 0: step 1: there are gradients that were made after the step inside backward()",)
LOOPS: dict[Callable[[GossipDataParallel], None], Sequence[str]] = {
    accumulate_as_plain_ddp_allows: SEVERAL,
    step_after_each_backward: (),
    never_call_step: (),
    accumulate_under_no_sync: (),
    write_gradients: NONE,
    accumulate_only: NONE,
    clip_in_between: CLIPPED,
    clip_what_was_accumulated: (),
    write_after_backward: WRITTEN,
}


def warnings_of(loop: Callable[[GossipDataParallel], None], model: GossipDataParallel) -> list[str]:
    with logged() as lines, model:
        loop(model)
    return lines


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", LOOPS)
def test_calls_of_step_that_mean_more_than_backward_does_are_pointed_out_once(
    loop: Callable[[GossipDataParallel], None], mode: str
) -> None:
    model = wrap(make_module(), mode)
    lines, texts = warnings_of(loop, model), LOOPS[loop]
    if "clip_grad_norm" in MODES[mode] and texts is CLIPPED:
        texts = ()  # nothing was lost
    assert len(lines) == (mode != "outside" and bool(texts))
    assert all(text in line for line in lines for text in texts)
    assert texts is not NONE or bool(model.step) == (mode == "outside")


def test_the_first_step_of_an_optimizer_is_answered_once_and_warnings_name_the_users_line() -> None:
    model = wrap(make_module(), "in backward")
    with logged("INFO") as lines:
        step_after_each_backward(model)
    (line,) = lines
    assert line.startswith("rank 0: optimizer.step() has nothing left to do: the updates were made inside backward()")
    assert "pass clip_grad_norm= where the module is wrapped; to keep the usual loop, wrap" in line
    with pytest.raises(ValueError, match="the update was made inside backward"):
        model.optimizer.step(lambda: 0.0)
    with pytest.warns(UserWarning, match="rank 0: step 5: a clip function found no gradients") as issued:
        clip_in_between(model)
    assert [warning.filename for warning in issued] == [__file__]
    of_another_rank = wrap(make_module(), "in backward")
    of_another_rank._live().optimizer_step_calls = OptimizerStepCalls("rank 1: ", "", tells=False)
    assert warnings_of(clip_in_between, of_another_rank) == []


def test_an_optimizer_that_was_stepped_in_turn_is_not_blamed() -> None:
    def loop(model: GossipDataParallel) -> None:
        backward(model)
        for optimizer in model.optimizer:
            optimizer.step()
        model.module[0].weight.grad = torch.ones(4, 3, dtype=torch.float64)  # which the next backward pass adds to
        backward(model)
        for optimizer in model.optimizer:
            optimizer.step()

    module = make_module()
    model = GossipDataParallel(module, (SGD(module[0].parameters()), SGD(module[2].parameters())))
    assert warnings_of(loop, model) == []
