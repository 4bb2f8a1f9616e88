"""TorchScript, and what is made under torch.inference_mode(): it works, or is refused when the model is built."""

import copy
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from replicas import SGD
from torch import nn

from gossip import GossipDataParallel, GossipError, VirtualWorkers

ALGORITHMS = ["adapt_while_communicating", "adapt_then_combine"]
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


class Layered(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.activation = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Tanh())
        self.second = nn.Linear(4, 2)


def script(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.")  # that it is old
        return torch.jit.script(module)


def with_scripted(name: str) -> nn.Module:
    module = Layered()
    setattr(module, name, script(getattr(module, name)))
    return module


SCRIPTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (lambda: script(Layered()), "module"),
    "a part with buffers": (lambda: with_scripted("norm"), "module 'norm'"),
}


@pytest.mark.parametrize("what", SCRIPTED)
def test_script_is_refused_by_name(what: str) -> None:
    make, name = SCRIPTED[what]
    for build in (functools.partial(GossipDataParallel, optimizer=SGD), lambda module: VirtualWorkers(module, 2, SGD)):
        with pytest.raises(ValueError, match=f"^{name} is TorchScript.*torch.compile.*after training"):
            build(make())


def test_scripted_part_without_state_trains_and_is_watched() -> None:
    plain, module = Layered(), with_scripted("activation")
    model, optimizer = GossipDataParallel(module, SGD), SGD(plain.parameters())
    for _ in range(3):
        for each in (plain, model):
            each(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    module.activation = nn.PReLU()
    with pytest.raises(GossipError, match=r"'activation\.weight' was added"):
        model(X)


def test_parameters_and_buffers_of_inference_mode_are_refused_by_name() -> None:
    with torch.inference_mode():
        other = Layered()
    with pytest.raises(ValueError, match=r"buffer 'norm\.running_mean' was made under torch\.inference_mode"):
        GossipDataParallel(other, SGD)
    other.norm = nn.BatchNorm1d(4)
    for build in (functools.partial(GossipDataParallel, optimizer=SGD), lambda module: VirtualWorkers(module, 2, SGD)):
        with pytest.raises(ValueError, match=r"parameter 'first\.weight' was made .*inference_mode.*deepcopy"):
            build(other)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("arguments", [{}, {"step_in_backward": False}, {"buffers": "average"}])
def test_model_built_in_inference_mode_trains_as_any_other(algorithm: str, arguments: dict) -> None:
    models = [GossipDataParallel(Layered(), SGD, algorithm=algorithm, **arguments)]
    module = Layered()
    with torch.inference_mode():
        models.append(GossipDataParallel(module, SGD, algorithm=algorithm, **arguments))
    for _ in range(3):
        for model in models:
            model(X).square().mean().backward()
            model.optimizer.step()
            model.optimizer.zero_grad()
    for model in models:
        with torch.inference_mode(), model.averaged():
            model(X)
        model.global_avg()
        copy.deepcopy(model)(X).sum().backward()
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))
