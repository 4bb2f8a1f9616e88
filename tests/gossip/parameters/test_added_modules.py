"""Modules and parameters that were added, replaced or removed after wrapping: refused by name."""

from collections.abc import Callable

import pytest
import torch
from small_runs import SGD
from torch import nn
from torch.nn.utils import parametrizations

from gossip import GossipDataParallel, GossipError, VirtualWorkers


class Adapted(nn.Module):
    """Layers in containers, as adapters are kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        self.adapters = nn.ModuleDict({"first": nn.Linear(4, 4)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        for adapter in self.adapters.values():
            x = x + adapter(x)
        return x * self.scales[0]


def batch() -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


ADDED: dict[str, tuple[Callable[[Adapted], object], str]] = {
    "appended": (lambda module: module.layers.append(nn.Linear(4, 4)), "layers.3.weight"),
    "frozen adapter": (lambda module: module.adapters.update({"b": nn.PReLU().requires_grad_(False)}), "adapters.b"),
    "in a part without parameters": (lambda module: module.layers[1].add_module("new", nn.PReLU()), "layers.1.new"),
    "parameter": (lambda module: module.layers[0].register_parameter("extra", nn.Parameter(torch.ones(1))), "0.extra"),
    "in a parameter list": (lambda module: module.scales.append(nn.Parameter(torch.ones(4))), "scales.1"),
    "replaced module": (lambda module: module.layers.__setitem__(2, nn.Linear(4, 4)), "layers.2.weight"),
    "weight norm": (lambda module: parametrizations.weight_norm(module.layers[0]), "parametrizations.weight.original0"),
}


@pytest.mark.parametrize("way", ADDED)
def test_parameter_added_after_wrapping_is_refused_at_the_next_forward(way: str) -> None:
    module = Adapted()
    model = GossipDataParallel(module, SGD)
    model(batch()).sum().backward()
    add, name = ADDED[way]
    add(module)
    with pytest.raises(GossipError, match=f"{name}.*was added after the module was wrapped.*before wrapping.*close"):
        model(batch())


def test_added_module_is_trained_once_it_is_wrapped_again() -> None:
    module = Adapted()
    model = GossipDataParallel(module, SGD, algorithm="adapt_then_combine")
    model(batch()).sum().backward()
    module.adapters["second"] = nn.Linear(4, 4)
    del module.layers[1]
    values = torch.full((4, 3), 0.25)
    module.layers[0].weight = nn.Parameter(values.clone())
    with pytest.raises(GossipError, match=r"'adapters\.second\.weight' was added"):
        model(batch())
    model.close()
    assert torch.equal(module.layers[0].weight, values)
    with GossipDataParallel(module, SGD) as model:
        before = module.adapters["second"].weight.detach().clone()
        model(batch()).square().mean().backward()
        assert not torch.equal(module.adapters["second"].weight, before)


def test_loop_that_calls_the_module_past_the_model_is_told_in_backward() -> None:
    module = Adapted()
    model = GossipDataParallel(module, SGD)
    module.adapters["second"] = nn.Linear(4, 4)
    with pytest.raises(GossipError, match=r"'adapters\.second\.weight' was added"):
        module(batch()).sum().backward()
    model.close()


def test_removed_module_is_refused_at_the_next_forward() -> None:
    module = Adapted()
    model = GossipDataParallel(module, SGD)
    del module.adapters["first"]
    with pytest.raises(GossipError, match=r"'adapters\.first\.weight' was removed after the module was wrapped"):
        model(batch())


def test_modules_without_parameters_come_and_go() -> None:
    module = Adapted()
    model = GossipDataParallel(module, SGD)
    module.layers.append(nn.Dropout(0.0))
    module.layers[1] = nn.ReLU()
    module.norm = nn.BatchNorm1d(4, affine=False)
    model(batch()).sum().backward()
    del module.layers[3], module.norm
    module.layers.append(nn.Identity())
    model(batch()).sum().backward()
    assert model.step == 2
    module.layers.append(nn.Linear(4, 4))  # still watched, in the containers as they are now
    with pytest.raises(GossipError, match=r"'layers\.4\.weight' was added"):
        model(batch())


# ------------------------------------------------------------------ virtual workers


class Branching(Adapted):
    """Cannot be vectorised: its replicas are run one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if bool((x.sum() > -1e9).item()) else x


def workers_of(module: nn.Module) -> VirtualWorkers:
    return VirtualWorkers(module, 2, SGD, "ring", devices=["cpu"])


@pytest.mark.parametrize("way", ["appended", "parameter", "replaced module"])
def test_virtual_workers_refuse_a_parameter_added_after_they_were_made(way: str) -> None:
    module = Adapted()
    workers = workers_of(module)
    workers(batch()).sum().backward()
    if way == "replaced module":
        module.layers[2] = nn.Linear(4, 2)
    else:
        ADDED[way][0](module)
    with pytest.raises(GossipError, match=r"parameter '.*' was (added|replaced|removed) after the replicas were made"):
        workers(batch())
    with pytest.raises(GossipError, match="after the replicas were made"):
        workers.every(batch())


def test_virtual_workers_see_new_parts_without_parameters_or_refuse_them() -> None:
    together, apart = workers_of(Adapted()), workers_of(Branching())
    for workers in (together, apart):
        workers(batch()).sum().backward()
        workers.module.layers.append(nn.Threshold(1e9, 7.0))
        workers.module.layers[1] = nn.ReLU()
    before = together.every(batch())
    together.module.layers[3] = nn.Identity()
    assert not torch.equal(together.every(batch()), before)
    for _ in range(2):
        with pytest.raises(GossipError, match="parts of the module were added, replaced or removed"):
            apart(batch())
