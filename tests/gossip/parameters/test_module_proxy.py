"""Attributes and signature of a model: its module's, to read and to write."""

import functools
import inspect
import pydoc
import types
from typing import Any

import pytest
import torch
from small_runs import SGD
from torch import nn

from gossip import GossipDataParallel, GossipError, VirtualWorkers


class Scaled(nn.Module):
    """What a user's module has: plain attributes, a property, a buffer, a parameter, a flag that need not be there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.temperature = 1.0
        self._cache: object = None
        self._half = 0.5
        self.register_buffer("offset", torch.zeros(2))

    @property
    def share(self) -> float:
        return self._half

    @share.setter
    def share(self, value: float) -> None:
        self._half = value

    @property
    def fixed(self) -> int:
        return 3

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        output = self.layer(inputs) * self.temperature * scale * self.share + self.offset
        output = output * getattr(self, "boost", 1.0)
        return output if labels is None else output - labels


@pytest.fixture
def model() -> Any:
    with GossipDataParallel(Scaled(), SGD) as model:
        yield model


X = torch.ones(4, 3)


# ------------------------------------------------------------------ attributes


def test_attribute_that_is_set_reaches_the_module(model: GossipDataParallel) -> None:
    plain = Scaled()
    for each in (model, plain):
        each.temperature = 5
        each.share = 0.25
        each.offset = torch.full((2,), 3.0)
        each._cache = "warm"
        each.boost = 2.0  # neither had it
    assert torch.equal(model(X), plain(X))
    written = model.module.temperature, model.module.share, model.module._cache, model.module.boost
    assert written == (5, 0.25, "warm", 2)
    assert model.boost == model.module.boost == 2
    assert "boost" not in vars(model)
    with pytest.raises(AttributeError, match="fixed"):
        model.fixed = 4
    with pytest.raises(TypeError, match="cannot assign"):
        model.offset = "no tensor"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: setattr(model, "head", nn.Linear(2, 2)), "head.weight"),
        (lambda model: setattr(model, "gain", nn.Parameter(torch.ones(1))), "gain"),
        (lambda model: model.register_module("head", nn.Linear(2, 2)), "head.weight"),
        (lambda model: model.register_parameter("gain", nn.Parameter(torch.ones(1))), "gain"),
    ],
)
def test_parameter_added_through_the_model_is_refused_as_one_in_the_module(
    model: GossipDataParallel, change: Any, name: str
) -> None:
    change(model)
    assert name in dict(model.module.named_parameters())
    with pytest.raises(GossipError, match=f"parameter '{name}' was added"):
        model(X)


def test_models_own_attributes_stay_its_own(model: GossipDataParallel) -> None:
    for name in ("step", "rank", "world_size", "grad_norm"):
        with pytest.raises(AttributeError):
            setattr(model, name, 3)
    own, model.optimizer = model.optimizer, model.optimizer
    assert model.optimizer is own
    model._original = model.forward  # what a library notes about the model that it holds
    assert "_original" not in vars(model.module)
    del model._original
    model.training = False
    assert not model.module.training
    handle = model.register_forward_hook(lambda *_: torch.zeros(1))
    assert torch.equal(model(X), torch.zeros(1))
    assert not model.module._forward_hooks
    handle.remove()


def test_forward_may_be_replaced_and_restored_as_accelerate_does(model: GossipDataParallel) -> None:
    wanted = model(X)
    function = model.forward.__func__

    @functools.wraps(function)
    def doubled(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * function(self, *args, **kwargs)

    assert model.forward == model.forward
    model.forward = types.MethodType(doubled, model)
    assert torch.equal(model(X), 2 * wanted)
    assert "forward" not in vars(model.module)
    assert list(inspect.signature(model.forward).parameters) == ["inputs", "labels", "scale"]
    del model.forward
    assert torch.equal(model(X), wanted)


def test_module_can_only_be_replaced_by_one_around_it(model: GossipDataParallel) -> None:
    wanted = model(X)
    for other in (Scaled(), nn.Sequential(model.module, nn.Linear(2, 2)), None):
        with pytest.raises(ValueError, match="module cannot be replaced by a"):
            model.module = other
    model.module = torch.compile(model.module, backend="eager")
    assert torch.equal(model(X), wanted)
    model(X).sum().backward()
    assert model.step == 1


# ------------------------------------------------------------------ signature


def test_signature_of_forward_is_the_modules(model: GossipDataParallel) -> None:
    assert inspect.signature(model.forward) == inspect.signature(model.module.forward)
    with GossipDataParallel(torch.compile(Scaled(), backend="eager"), SGD) as compiled:
        assert inspect.signature(compiled.forward) == inspect.signature(model.module.forward)
    assert str(inspect.signature(GossipDataParallel.forward)) == "(self, *args: 'Any', **kwargs: 'Any') -> 'Any'"
    assert "Call the module" in pydoc.render_doc(GossipDataParallel)
    assert "Call the module" in pydoc.render_doc(model.forward)


# ------------------------------------------------------------------ virtual workers


def test_virtual_workers_refuse_an_attribute_that_they_do_not_have() -> None:
    workers = VirtualWorkers(Scaled(), 2, SGD, devices=["cpu"])
    with pytest.raises(AttributeError, match=r"'temperature'.*workers\.module\.temperature = .* before the first call"):
        workers.temperature = 5
    workers.module.temperature = 5
    workers.step = 0
    assert torch.equal(workers.every(X)[1], 5 * Scaled()(X))
