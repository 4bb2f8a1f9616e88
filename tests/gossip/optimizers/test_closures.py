"""optimizer.step(closure): the order of the loop without a closure, wherever an optimizer evaluates it once."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from small_runs import assert_same, loss_of, make_module
from small_runs import wrap as wrap_small
from torch import nn

from gossip import GossipDataParallel, GossipError

NUM_STEPS = 4
FACTORIES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "fused AdamW": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}


def make_closure(
    module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], step: int, rank: int = 0
) -> Callable[[], torch.Tensor]:
    """As Lightning's: gradients are zeroed inside it."""

    def closure() -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(module, rank, step)
        loss.backward()
        return loss.detach()

    return closure


def wrap(module: nn.Module, optimizer: Any, **arguments: Any) -> GossipDataParallel:
    return wrap_small(module, optimizer=optimizer, topology="ring", step_in_backward=False, **arguments)


def train(factory: str, algorithm: str, with_closure: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Parameters, losses, and in which order gradients were taken and messages mixed in."""
    model = wrap(make_module(), FACTORIES[factory], algorithm=algorithm)
    events: list[str] = []
    combine_ = model._engine.exchanges.combine_

    def combine_and_note_(*arguments: Any) -> None:
        events.append("mixed")
        combine_(*arguments)

    model._engine.exchanges.combine_ = combine_and_note_
    losses = []
    for step in range(NUM_STEPS):
        evaluate = make_closure(model, [model.optimizer], step, model.rank)

        def closure(evaluate: Callable[[], torch.Tensor] = evaluate) -> torch.Tensor:
            loss = evaluate()
            events.append("gradients")
            return loss

        if with_closure:
            with torch.no_grad():
                losses.append(model.optimizer.step(closure))
        else:
            losses.append(closure())
            model.optimizer.step()
        events.append("stepped")
    model.state_dict()
    values = [parameter.detach().clone() for parameter in model.parameters()]
    assert model.step == NUM_STEPS
    return values, losses, events


@on_ranks(2)
def test_closure_makes_the_steps_of_the_loop_without_one() -> None:
    for factory, algorithm in itertools.product(FACTORIES, ("adapt_while_communicating", "adapt_then_combine")):
        with_closure = train(factory, algorithm, with_closure=True)
        without = train(factory, algorithm, with_closure=False)
        assert all(map(torch.equal, with_closure[0], without[0])), (factory, algorithm)
        assert with_closure[1] == without[1], (factory, algorithm)
        assert with_closure[2] == without[2], (factory, algorithm)
        if algorithm == "adapt_while_communicating":  # messages travel while gradients are taken
            second_step = with_closure[2][with_closure[2].index("stepped") + 1 :]
            assert second_step[:2] == ["gradients", "mixed"]


def test_closure_that_raises_leaves_the_model_usable() -> None:
    model, plain = wrap(make_module(), FACTORIES["SGD"]), make_module()
    with pytest.raises(ZeroDivisionError):
        model.optimizer.step(lambda: 1 / 0)
    optimizer = FACTORIES["SGD"](plain.parameters())
    for module, each in ((model, model.optimizer), (plain, optimizer)):
        each.step(make_closure(module, [each], 0))
    assert model.step == 1
    assert_same(model, plain)


@pytest.mark.parametrize("knows", [True, False])
def test_closure_that_the_scaler_steps_is_refused_and_nothing_is_lost(knows: bool) -> None:
    scaler = torch.amp.GradScaler("cpu")
    model = wrap(make_module(), FACTORIES["SGD"], scaler=scaler if knows else None)
    scaler.scale(loss_of(model, 0, 0)).backward()
    with pytest.raises(ValueError, match=r"evaluate it yourself, then call scaler\.step\(optimizer\)"):
        scaler.step(model.optimizer, make_closure(model, [model.optimizer], 0))
    assert model.step == 0


# ------------------------------------------------------------------ optimizers that evaluate it otherwise


class SharpnessAware(torch.optim.SGD):
    """Goes uphill first, and takes the gradient there."""

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
        assert closure is not None
        climbed = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, ascent in climbed:
            parameter.add_(ascent)
        with torch.enable_grad():
            loss = closure()
        for parameter, ascent in climbed:
            parameter.sub_(ascent)
        super().step()
        return loss


class Twice(torch.optim.SGD):
    """Looks at the loss again after the update."""

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
        assert closure is not None
        with torch.enable_grad():
            closure()
        super().step()
        with torch.enable_grad():
            return closure()


class SharpnessAwareByItself(SharpnessAware):
    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "when"), [(SharpnessAware, "after it has changed parameters or gradients"), (Twice, "again")]
)
def test_optimizer_that_evaluates_its_closure_elsewhere_is_refused_with_the_remedy(
    kind: type[torch.optim.Optimizer], when: str
) -> None:
    model = wrap(make_module(), functools.partial(kind, lr=0.1))
    loss_of(model, 0, 0).backward()
    with pytest.raises(GossipError) as caught:
        model.optimizer.step(make_closure(model, [model.optimizer], 0))
    assert f"rank 0: step 0: {kind.__name__}.step(closure) evaluates the closure {when}" in str(caught.value)
    assert "in a subclass: def step(self, closure): return super().step(closure)" in str(caught.value)


@pytest.mark.parametrize(
    "factory",
    [functools.partial(SharpnessAwareByItself, lr=0.1), functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=3)],
)
def test_optimizer_that_requires_a_closure_evaluates_it_itself(factory: Callable[..., torch.optim.Optimizer]) -> None:
    model, plain = wrap(make_module(), factory), make_module()
    optimizer = factory(list(plain.named_parameters()))
    for step in range(NUM_STEPS):
        losses = [
            each.step(make_closure(module, [each], step))
            for module, each in ((model, model.optimizer), (plain, optimizer))
        ]
        assert torch.equal(*losses)
    assert model.step == NUM_STEPS
    assert_same(model, plain)
