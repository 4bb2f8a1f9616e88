"""torch.compile of a model, its module or a training step: trained as the eager one, and nothing of ours warns."""

import logging.handlers
import sys
import warnings

import pytest
import torch
from ranks import on_ranks
from small_runs import SGD
from tiers import rest_is_slow
from torch import nn
from torch._dynamo.testing import CompileCounter

from gossip import GossipDataParallel

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
