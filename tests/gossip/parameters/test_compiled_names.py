"""Names are those of the bare module, whichever part of it was compiled."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from replicas import SGD, assert_equal_states, snapshot
from safetensors.torch import load_file
from torch import nn

import gossip
from gossip import GossipDataParallel, VirtualWorkers

# Of the compiler itself, for the input of a compiled part.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")

compiled = partial(torch.compile, backend="eager")


class Net(nn.Sequential):
    """Layers of which one is frozen and one has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.layers[0].bias.requires_grad_(False)


def child(net: Net) -> nn.Module:
    net.layers[1] = compiled(net.layers[1])
    return net


def nested(net: Net) -> nn.Module:
    net.layers = compiled(child(net).layers)
    return compiled(net)


WAYS: dict[str, Callable[[Net], nn.Module]] = {
    "bare": lambda net: net,
    "whole": compiled,
    "child": child,
    "nested": nested,
}
NAMES = list(Net().state_dict())


def make(way: str, **options: Any) -> GossipDataParallel:
    torch.manual_seed(0)
    return GossipDataParallel(WAYS[way](Net()), SGD, "ring", **options)


def one_step(model: Any) -> None:
    model(torch.arange(32.0).reshape(8, 4) / 32).square().mean().backward()


@pytest.mark.parametrize("way", WAYS)
def test_everything_that_leaves_a_model_has_bare_names(way: str, tmp_path: Path) -> None:
    with make(way, buffers="average") as model:
        one_step(model)
        path = gossip.save(model, tmp_path / "saved")
        gossip.export(model, tmp_path / "exported.safetensors")
        assert list(model.state_dict()) == NAMES
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in Net().named_buffers()]
        assert model.optimizer.state_dict()["param_groups"][0]["param_names"] == [*dict(Net().named_parameters())]
        values = {name: value.clone() for name, value in model.state_dict().items()}
    assert sorted(load_file(tmp_path / "exported.safetensors")) == sorted(NAMES)
    assert "_orig_mod" not in (path / "manifest.json").read_text()
    plain = Net()
    plain.load_state_dict(values)
    with make(way) as model:
        model.load_state_dict({f"module.{name}": value for name, value in values.items()})
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        outer = nn.Sequential(model)
        outer.load_state_dict({f"0.{name}": value for name, value in values.items()})
        assert list(outer.state_dict()) == [f"0.{name}" for name in NAMES]
        if way in ("bare", "child"):  # the compiler refuses to wrap a module around one that is compiled as a whole
            around = compiled(model)
            around.load_state_dict(around.state_dict())
            assert list(around.state_dict()) == [f"_orig_mod.{name}" for name in NAMES]


@pytest.mark.parametrize(("now", "before"), [("whole", "bare"), ("child", "nested")])
def test_a_checkpoint_loads_compiled_or_not(now: str, before: str, tmp_path: Path) -> None:
    with make(before) as model:
        one_step(model)
        gossip.save(model, tmp_path)
        one_step(model)
        wanted = snapshot(model)
    with make(now) as model:
        gossip.load(model, tmp_path)
        assert model.step == 1
        one_step(model)
        assert_equal_states(model.state_dict(), wanted)
    torch.manual_seed(0)
    workers = VirtualWorkers(WAYS[now](Net()), 1, SGD, buffers="average")
    assert [name for name, _ in workers.named_parameters()] == [name for name, _ in Net().named_parameters()]
    gossip.load(workers, tmp_path)
    assert workers.step == 1
    one_step(workers)
    with workers.averaged() as module:
        assert torch.isfinite(module(torch.ones(8, 4))).all()
