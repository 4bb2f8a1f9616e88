"""When a backward pass makes a step, and what happens around steps that go wrong."""

import functools
import gc
import warnings
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from ranks import error_of, on_ranks
from small_runs import SGD, assert_same, batch, make_module, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from gossip import GossipDataParallel, GossipError, ManifestError

# ------------------------------------------------------------------ what is a step


def test_gradient_penalty_is_one_step_and_equals_plain_torch() -> None:
    model, plain = wrap(), make_module()
    optimizer = SGD(plain.parameters())
    for module in (model, plain):
        inputs = batch(0, 0).requires_grad_()
        output = module(inputs)
        (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        (output.mean() + gradient.square().sum()).backward()
    optimizer.step()
    assert model.step == 1
    assert_same(model, plain, 1e-12)


@dataclass
class Inner:
    logits: torch.Tensor


@dataclass
class Output:
    """Hides the tensor two objects deep, and knows itself."""

    inner: Inner
    unset: int = field(init=False)
    itself: object = None


class Checkpointed(nn.Module):
    """Segments under checkpoint, and an output that is not a plain tensor."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.segments = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Output:
        for segment in self.segments:
            x = checkpoint(segment, x, use_reentrant=self.use_reentrant)
        output = Output(Inner(x))
        output.itself = output
        return output


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("as_a_whole", [True, False])
def test_checkpointed_model_makes_one_step(use_reentrant: bool, as_a_whole: bool) -> None:
    model, plain = wrap(Checkpointed(use_reentrant)), Checkpointed(use_reentrant)
    for module in (model, plain):
        inputs = torch.ones(2, 4, requires_grad=True)
        if as_a_whole:
            logits = checkpoint(lambda x, module=module: module(x).inner.logits, inputs, use_reentrant=use_reentrant)
        else:
            logits = module(inputs).inner.logits
        logits.square().mean().backward()
    SGD(plain.parameters()).step()
    assert model.step == 1
    assert_same(model, plain, 1e-6)


# ------------------------------------------------------------------ what goes wrong


class CountingInItself(torch.optim.SGD):
    count = 0

    def step(self, closure: None = None) -> None:
        self.count += 1
        super().step(closure)


def test_optimizer_that_counts_for_all_parameters_is_refused() -> None:
    model = GossipDataParallel(make_module(), functools.partial(CountingInItself, lr=0.1))
    with pytest.raises(GossipError, match="CountingInItself keeps 'count' for several parameters at once"):
        model(batch(0, 0)).sum().backward()


def test_scheduler_built_before_wrapping_does_not_warn() -> None:
    module = make_module()
    optimizer = SGD(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model = GossipDataParallel(module, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(batch(0, 0)).sum().backward()
            scheduler.step()


# ------------------------------------------------------------------ ends


def test_model_that_is_dropped_is_freed() -> None:
    model = wrap()
    model(batch(0, 0)).sum().backward()
    block = weakref.ref(model.module[0].weight)
    del model
    gc.collect()
    assert block() is None


# ------------------------------------------------------------------ buffers


@on_ranks(2)
def test_buffers_that_came_to_differ_are_named_on_every_rank() -> None:
    module = nn.Linear(1, 1)
    model = GossipDataParallel(module, SGD, "ring")
    module.register_buffer("cache", torch.zeros(4 + model.rank))
    text = "buffer 'cache' is torch.float32 [4] on rank 0, but torch.float32 [5] on rank 1"
    assert text in error_of(ManifestError, model.global_avg)
