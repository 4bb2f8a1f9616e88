"""When a backward pass makes a step, what happens around steps that go wrong, and around compiled ones."""

import functools
import gc
import logging.handlers
import sys
import warnings
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from ranks import error_of, on_ranks
from small_runs import SGD, assert_same, batch, make_module, wrap
from tiers import rest_is_slow
from torch import nn
from torch._dynamo.testing import CompileCounter
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


NUM_LAYERS = 10  # more than torch._dynamo.config.recompile_limit


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(NUM_LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def compile_what(what: str, graphs: CompileCounter, **arguments: object) -> tuple[GossipDataParallel, nn.Module]:
    """The model, and what to call."""
    module: nn.Module = Deep()
    if what == "module":
        module = torch.compile(module, backend=graphs)
    elif what == "module in place":
        module.compile(backend=graphs)
    elif what == "part":  # which is awaited before the whole
        module.layers[3].compile(backend=graphs)
    model = GossipDataParallel(module, SGD, "ring", bucket_cap_mb=71 / 2**20, **arguments)
    if what == "model in place":
        model.compile(backend=graphs)
    return model, torch.compile(model, backend=graphs) if what == "model" else model


def train_listening(what: str, **arguments: object) -> tuple[list[str], int, int, torch.Tensor]:
    torch._dynamo.reset()
    handler, graphs = logging.handlers.BufferingHandler(sys.maxsize), CompileCounter()
    handler.setLevel(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("torch", "torch._dynamo", "torch._inductor")]
    for each in loggers:
        each.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
        model, called = compile_what(what, graphs, **arguments)

        def step(x: torch.Tensor) -> None:
            called(x).square().mean().backward()
            model.optimizer.step()
            model.optimizer.zero_grad()

        compiled_step = torch.compile(step, backend=graphs) if what == "step" else step
        for number in range(4):
            compiled_step(torch.full((2, 3), float(number)))
        assert model.step == 4
        model.state_dict()  # by now all is combined
        values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        model.close()
    for each in loggers:
        each.removeHandler(handler)
    said = [*map(str, caught), *(record.getMessage() for record in handler.buffer)]
    return said, graphs.frame_count, graphs.op_count, values


@pytest.mark.parametrize("algorithm", rest_is_slow(["adapt_while_communicating", "adapt_then_combine"]))
@on_ranks(2, anew=True)
def test_compiled_training_leaves_no_warnings(algorithm: str) -> None:
    *_, eager = train_listening("nothing", algorithm=algorithm)
    for what in ("model", "model in place", "module", "module in place", "part", "step"):
        said, num_graphs, num_operations, values = train_listening(what, algorithm=algorithm)
        assert said == [], what
        torch.testing.assert_close(values, eager)
        assert num_graphs > 0 or what == "part"  # a layer of torch's own is left as it is
        if algorithm == "adapt_while_communicating" and what not in ("part", "step"):  # the whole, once
            assert (num_graphs, num_operations) == (1, 2 * NUM_LAYERS), what
    said, *_ = train_listening("model", algorithm=algorithm, step_in_backward=False)
    assert said == []
