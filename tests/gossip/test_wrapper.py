"""Construction, mixing, and being a plain trainer in a world of one."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from ranks import run_ranks
from replicas import (
    SGD,
    TINY_BUCKETS,
    assert_equal_states,
    snapshot,
)
from torch import nn

from gossip import (
    GossipDataParallel,
    GossipError,
)
from topologies import Round, Topology, build


def test_construction_keeps_strides_and_ties() -> None:
    module = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "linear": nn.Linear(5, 3)})
    module["conv"].to(memory_format=torch.channels_last)
    module["linear"].weight = nn.Parameter(torch.arange(30.0).view(5, 6).t()[1:4, :])
    module["tied"] = nn.Linear(5, 3)
    module["tied"].weight = module["linear"].weight
    wanted = {name: (tensor.clone(), tensor.stride()) for name, tensor in module.state_dict().items()}
    model = GossipDataParallel(module, SGD)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name][0])
        assert tensor.stride() == wanted[name][1]
    assert module["tied"].weight is module["linear"].weight
    model.close()


@pytest.mark.parametrize(
    ("kwargs", "error", "reason"),
    [
        ({"topology": 3}, TypeError, "topology must be a name or a topologies.Topology, got int"),
        ({"topology": build("ring", 4)}, ValueError, "is for 4 ranks, but there are 1"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb must be a positive number of MiB, got 0"),
        ({"optimizer": 3}, TypeError, "several in a tuple, or a factory"),
        ({"optimizer": functools.partial(torch.optim.LBFGS)}, ValueError, "closure"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, ValueError, "that the module does not have"),
    ],
)
def test_construction_refuses_arguments_with_the_reason(kwargs: dict, error: type, reason: str) -> None:
    with pytest.raises(error, match=reason):
        GossipDataParallel(nn.Linear(2, 2), **{"optimizer": None} | kwargs)


def test_construction_without_process_group_refuses_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"init_process_group first, or start the function with gossip\.launch"):
        GossipDataParallel(nn.Linear(2, 2), None)


def check_biased_weights_are_refused() -> None:
    rows = np.array([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]])
    topology = Topology.from_rounds([Round.from_matrix(rows)], stochasticity="row")
    with pytest.raises(ValueError, match="only row-stochastic"):
        GossipDataParallel(nn.Linear(2, 2), SGD, topology)


def test_construction_refuses_weights_that_bias_the_mean() -> None:
    run_ranks(check_biased_weights_are_refused, world_size=3)


def half_precision_mixing() -> np.ndarray:
    module = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    model = GossipDataParallel(module, None, "complete")
    with torch.no_grad():
        module.weight.fill_(1 + 2**-7 * model.rank)  # the sum of four has no place in bfloat16
    for _ in range(2):
        model.idle_step()
    return module.weight.detach().float().numpy()


def test_half_precision_is_mixed_in_float32() -> None:
    for weight in run_ranks(half_precision_mixing, world_size=4):
        assert np.all(weight == float(torch.tensor(1 + 2**-7 * 1.5).bfloat16()))


def test_world_of_one_trains_as_plain_torch() -> None:
    torch.manual_seed(0)
    plain, wrapped = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), None
    wrapped = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    model = GossipDataParallel(wrapped, functools.partial(torch.optim.AdamW, lr=0.01), bucket_cap_mb=TINY_BUCKETS)
    fused_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(model.optimizer, T_max=10)
    for _ in range(10):
        inputs = torch.randn(3, 4)
        plain(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        model(inputs).square().mean().backward()
        fused_scheduler.step()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    with model.averaged():
        assert_equal_states(snapshot(model), plain.state_dict())
    model.global_avg()
    assert_equal_states(snapshot(model), plain.state_dict())
    fresh = torch.optim.AdamW(plain.parameters(), lr=0.01)
    fresh.load_state_dict(model.optimizer.state_dict())
    for parameter in plain.parameters():
        assert torch.equal(fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    assert all(parameter.grad is None for parameter in model.parameters())
    model.close()


def test_closed_model_trains_plainly() -> None:
    module = nn.Linear(3, 1)
    model = GossipDataParallel(module, SGD)
    optimizer = model.optimizer
    model.close()
    before = module.weight.detach().clone()
    module(torch.ones(1, 3)).sum().backward()
    assert torch.equal(module.weight, before)
    assert module.weight.grad is not None
    optimizer.step()
    assert not torch.equal(module.weight, before)
    with pytest.raises(GossipError, match="has been closed"):
        model(torch.ones(1, 3))


def test_second_gradient_for_an_updated_bucket_is_refused() -> None:
    model = GossipDataParallel(nn.Linear(3, 1), SGD)
    first, second = model(torch.ones(1, 3)).sum(), model(torch.ones(1, 3)).sum()
    first.backward()
    second.backward()
    assert model.step == 2  # a linear layer's weight is not needed again: nothing is corrupted
    model = GossipDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), SGD)
    first, second = model(torch.ones(1, 3)).sum(), model(torch.ones(1, 3)).sum()
    first.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
