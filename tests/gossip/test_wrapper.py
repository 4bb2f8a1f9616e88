"""Construction, mixing, and being a plain trainer in a world of one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from replicas import (
    SGD,
    TINY_BUCKETS,
    assert_equal_states,
    gathered,
    rank_module,
    snapshot,
    train,
)
from torch import nn

from gossip import (
    Arrival,
    Conversation,
    GossipDataParallel,
    GossipError,
    Transport,
)
from topologies import Round, Topology, build


def check_start() -> None:
    module = rank_module()
    original = {name: gathered(tensor)[0] for name, tensor in copy.deepcopy(module).state_dict().items()}
    model = GossipDataParallel(module, SGD, "ring", bucket_cap_mb=TINY_BUCKETS)
    assert_equal_states(snapshot(model), original)
    model.close()


def test_construction_copies_rank_0_parameters_and_buffers() -> None:
    run_ranks(check_start, world_size=3)


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


def shared_memory_module() -> nn.Module:
    module = nn.Module()
    values = torch.zeros(10)
    module.a, module.b = nn.Parameter(values[:6]), nn.Parameter(values[4:])
    return module


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.LazyLinear(3), "'weight' is lazy; run one forward"),
        (nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (nn.Linear(2, 2, dtype=torch.complex64), "'weight' has the dtype torch.complex64"),
        (nn.ParameterDict({"wide": nn.Parameter(torch.zeros(1).expand(3))}), "'wide' overlaps itself"),
        (shared_memory_module(), "'a' and 'b' are two Parameters over the same memory"),
    ],
)
def test_construction_refuses_parameters_by_name(module: nn.Module, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        GossipDataParallel(module, None)


@pytest.mark.parametrize(
    ("kwargs", "error", "reason"),
    [
        ({"topology": "rign"}, ValueError, "ring"),
        ({"topology": 3}, TypeError, "topology must be a name or a topologies.Topology, got int"),
        ({"topology": build("ring", 4)}, ValueError, "is for 4 ranks, but there are 1"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb must be a positive number of MiB, got 0"),
        ({"optimizer": 3}, TypeError, "several in a tuple, or a factory"),
        ({"optimizer": lambda _: 3}, TypeError, "or a factory of them, got int"),
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


def average_follows_all_reduce(name: str) -> None:
    """Plain SGD on gradients A x - b_i: whatever the doubly stochastic W, the average descends as all-reduce's does."""
    torch.manual_seed(0)
    matrix, targets = torch.randn(6, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    matrix = matrix @ matrix.T / 6

    class Quadratic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(6, dtype=torch.float64))

        def forward(self) -> torch.Tensor:
            return 0.5 * self.x @ matrix @ self.x - targets[dist.get_rank()] @ self.x

    model = GossipDataParallel(Quadratic(), functools.partial(torch.optim.SGD, lr=0.1), name)
    together = torch.ones(6, dtype=torch.float64)
    for _ in range(25):
        model().backward()
        together = together - 0.1 * (matrix @ together - targets.mean(0))
    rows = gathered(model.module.x.detach())
    assert (rows - rows.mean(0)).abs().max() > 1e-3
    torch.testing.assert_close(rows.mean(0), together, rtol=0, atol=1e-13)


def averages_follow_all_reduce() -> None:
    for name in ("ring", "directed_ring", "star", "one_peer_exponential", "random_matching"):
        average_follows_all_reduce(name)


def test_average_of_replicas_follows_all_reduce_exactly() -> None:
    run_ranks(averages_follow_all_reduce, world_size=4)


@dataclass
class EmptyExchange:
    message: torch.Tensor
    bytes_by_peer: Mapping[int, int] = field(default_factory=dict)
    arrived_at: Mapping[int, float] = field(default_factory=dict)

    def wait(self) -> Arrival:
        return Arrival(iter([(slice(0, self.message.numel()), torch.zeros_like(self.message))]), is_finite=True)


class RecordingTransport(Transport):
    """Sends nothing anywhere; remembers which round it was asked to carry."""

    rounds: ClassVar[list[tuple[int, int, Round]]] = []

    def __init__(self, *_: object) -> None:
        self.rounds.clear()

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> EmptyExchange:
        self.rounds.append((step, bucket, round_))
        return EmptyExchange(next(iter(conversation.opening.sent.values())))


def rounds_used() -> list[tuple[int, int, int]]:
    topology = build("one_peer_ring", 4)
    model = GossipDataParallel(rank_module(), SGD, topology, bucket_cap_mb=TINY_BUCKETS, transport=RecordingTransport)
    train(model, range(5))
    assert all(round_ is topology.round(step) for step, _, round_ in RecordingTransport.rounds)
    model.close()
    return [(step, bucket) for step, bucket, _ in RecordingTransport.rounds]


def test_rounds_count_from_0_without_a_skip_in_every_bucket() -> None:
    for used in run_ranks(rounds_used, world_size=4):
        num_buckets = 1 + max(bucket for _, bucket in used)
        assert used == [(step, bucket) for step in range(5) for bucket in range(num_buckets)]


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
