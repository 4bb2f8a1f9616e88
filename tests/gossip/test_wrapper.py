"""What holds besides the recursion: averaging, restoring, refusing, and being a plain trainer in a world of one."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip import ExchangeError, GossipDataParallel, GossipError, ManifestError, World, launch
from topologies import Round, Topology, build

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TINY_BUCKETS = 71 / 2**20


class NormalisedNet(nn.Module):
    """With float, integer and boolean buffers, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 6)
        self.third.weight = self.second.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("level", torch.zeros(5, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.relu(self.norm(self.first(x)))))) * self.frozen.sum()


def rank_module(seed: int = 0) -> NormalisedNet:
    """Another initialisation on every rank."""
    torch.manual_seed(seed + dist.get_rank())
    module = NormalisedNet()
    with torch.no_grad():
        module.level.fill_(dist.get_rank() + 1)
        module.frozen.fill_(dist.get_rank() + 1)
    return module


def train(model: GossipDataParallel, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * model.rank + step)
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()


def snapshot(model: GossipDataParallel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal_states(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(actual[name], wanted[name]), name


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return torch.stack(rows)


# ------------------------------------------------------------------ construction


def check_start() -> None:
    module = rank_module()
    original = {name: gathered(tensor)[0] for name, tensor in copy.deepcopy(module).state_dict().items()}
    model = GossipDataParallel(module, SGD, "ring", bucket_cap_mb=TINY_BUCKETS)
    assert_equal_states(snapshot(model), original)
    model.close()


def test_construction_copies_rank_0_parameters_and_buffers() -> None:
    launch(check_start, world_size=3)


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
        GossipDataParallel(module)


@pytest.mark.parametrize(
    ("kwargs", "error", "reason"),
    [
        ({"topology": "rign"}, ValueError, "ring"),
        ({"topology": 3}, TypeError, "topology must be a name or a topologies.Topology, got int"),
        ({"topology": build("ring", 4)}, ValueError, "is for 4 ranks, but there are 1"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb must be a positive number of MiB, got 0"),
        ({"optimizer": 3}, TypeError, "optimizer must be a torch.optim.Optimizer or a factory"),
        ({"optimizer": lambda _: 3}, TypeError, "factory must return a torch.optim.Optimizer, got int"),
        ({"optimizer": functools.partial(torch.optim.LBFGS)}, ValueError, "closure"),
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, ValueError, "that the module does not have"),
    ],
)
def test_construction_refuses_arguments_with_the_reason(kwargs: dict, error: type, reason: str) -> None:
    with pytest.raises(error, match=reason):
        GossipDataParallel(nn.Linear(2, 2), **kwargs)


def test_construction_without_process_group_refuses_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"init_process_group first, or start the function with gossip\.launch"):
        GossipDataParallel(nn.Linear(2, 2))


def check_biased_weights_are_refused() -> None:
    rows = np.array([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]])
    topology = Topology.from_rounds([Round.from_matrix(rows)], stochasticity="row")
    with pytest.raises(ValueError, match="only row-stochastic"):
        GossipDataParallel(nn.Linear(2, 2), SGD, topology)


def test_construction_refuses_weights_that_bias_the_mean() -> None:
    launch(check_biased_weights_are_refused, world_size=3)


# ------------------------------------------------------------------ manifest


def odd_one_out(what: str) -> str:
    """What every rank is told when rank 2 differs."""
    odd = dist.get_rank() == 2
    module: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    topology, bucket_cap_mb, optimizer = "ring", 25.0, SGD
    if odd and what == "shape":
        module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    if odd and what == "dtype":
        module[1].double()
    if odd and what == "order":
        module = nn.Sequential(nn.Linear(3, 2), nn.Linear(4, 3))
    if odd and what == "buffer":
        module.register_buffer("mean", torch.zeros(2))
    if odd and what == "frozen":
        module[0].weight.requires_grad_(False)
    if odd and what == "topology":
        topology = "complete"
    if odd and what == "bucket_cap_mb":
        bucket_cap_mb = 1.0
    if odd and what == "optimizer":
        optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
    if odd and what == "refused":
        topology = "hypercube"
    with pytest.raises((ManifestError, ValueError)) as caught:
        GossipDataParallel(module, optimizer, topology, bucket_cap_mb=bucket_cap_mb)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("shape", ["parameter 1 is '0.weight' float32 [3, 4]", "on rank 0, but '0.weight' float32 [5, 4]"]),
        ("dtype", ["parameter 3 is '1.weight' float32", "but '1.weight' float64"]),
        ("order", ["parameter 1 is '0.weight' float32 [3, 4]", "but '0.weight' float32 [2, 3]"]),
        ("buffer", ["buffer 1 is nothing on rank 0, but 'mean' float32 [2]"]),
        ("frozen", ["parameter 1 is '0.weight'", "frozen on rank 2"]),
        ("topology", ["topology is", "ring", "on rank 0, but", "complete"]),
        ("bucket_cap_mb", ["bucket_cap_mb is 25 on rank 0, but 1 on rank 2"]),
        ("optimizer", ["optimizer is SGD on rank 0, but AdamW on rank 2"]),
    ],
)
def test_manifest_difference_is_named_on_every_rank(what: str, texts: list[str]) -> None:
    messages = launch(odd_one_out, what, world_size=3)
    assert len(set(messages)) == 1
    assert "rank 2" in messages[0]
    for text in texts:
        assert text in messages[0]


def test_manifest_tells_the_others_what_one_rank_refused() -> None:
    first, second, odd = launch(odd_one_out, "refused", world_size=3)
    assert first == second
    assert "on rank 2" in first
    assert "hypercube" in first
    assert "hypercube" in odd


def gather_words() -> tuple[list[bytes], list[bytes]]:
    world = World(timedelta(seconds=60))
    everyone = world.gather_bytes(b"x" * (2 * world.rank), "testing"), world.gather_bytes(b"", "testing")
    world.close()
    return everyone


def test_bytes_of_any_length_are_gathered() -> None:
    assert launch(gather_words, world_size=3) == [([b"", b"xx", b"xxxx"], [b"", b"", b""])] * 3


# ------------------------------------------------------------------ time-outs


def stop_early(topology: str) -> str:
    """Rank 1 makes one step, the others try to make three: what they are told."""
    model = GossipDataParallel(nn.Linear(3, 1), SGD, topology, timeout=timedelta(seconds=0.5))
    model(torch.ones(1, 3)).sum().backward()
    text = "stopped"
    if model.rank != 1:
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ExchangeError) as caught:
            model(torch.ones(1, 3)).sum().backward()
        text = str(caught.value)
        with pytest.raises(GossipError, match="no training or averaging after"):
            model(torch.ones(1, 3))
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return text


@pytest.mark.parametrize(
    ("topology", "first", "third"),
    [
        ("directed_ring", "the message of rank 1", "rank 1 to take ours"),
        ("ring", "the all-reduce with ranks 1, 2", "the all-reduce with ranks 0, 1"),
    ],
)
def test_wait_for_a_rank_that_made_fewer_steps_is_named(topology: str, first: str, third: str) -> None:
    by_rank = launch(stop_early, topology, world_size=3)
    for rank, awaited in ((0, first), (2, third)):
        assert f"rank {rank}: step 1, bucket 0: waited 0.5 s in vain for {awaited}; that rank" in by_rank[rank]


def absent_at_average() -> str:
    model = GossipDataParallel(nn.Linear(3, 1), SGD, "ring", timeout=timedelta(seconds=0.5))
    text = "absent"
    if model.rank:
        with pytest.raises(ExchangeError) as caught:
            model.global_avg()
        text = str(caught.value)
        with pytest.raises(GossipError, match="no training or averaging after"):
            model.global_avg()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return text


def test_wait_for_an_absent_rank_at_the_global_average_is_named() -> None:
    _, second, third = launch(absent_at_average, world_size=3)
    assert "rank 1: comparing buffers before averaging: not all of the 3 ranks took part within 0.5 s" in second
    assert "rank 2: comparing buffers before averaging" in third


# ------------------------------------------------------------------ averaging


def check_global_average() -> None:
    model = GossipDataParallel(rank_module(), SGD, "one_peer_exponential", bucket_cap_mb=TINY_BUCKETS)
    train(model, range(5))
    with torch.no_grad():
        model.module.level.fill_(model.rank)
        model.module.mask.fill_(model.rank == 0)
    before = {name: gathered(tensor) for name, tensor in snapshot(model).items()}
    model.global_avg()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, before[name].double().mean(0).to(tensor.dtype))
        else:
            assert torch.equal(tensor, before[name][0]), name
        assert torch.equal(gathered(tensor), tensor.expand(model.world_size, *tensor.shape)), name
    assert max(model.consensus_distance()) < 1e-6
    assert model.step == 5
    # What was in flight before is gone: the next step starts from the average, everywhere.
    average = snapshot(model)
    train(model, range(5, 6))
    model.close()
    plain = rank_module()
    plain.load_state_dict(average)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            update = 0.1 * model.optimizer.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(parameter, plain.get_parameter(name) - update)


def test_global_avg_makes_all_ranks_equal_and_drops_what_was_in_flight() -> None:
    launch(check_global_average, world_size=4)


def train_and_look(look: bool) -> dict[str, np.ndarray]:
    model = GossipDataParallel(rank_module(), SGD, "exponential", bucket_cap_mb=TINY_BUCKETS)
    for step in range(6):
        train(model, range(step, step + 1))
        if look:
            before = snapshot(model)
            rows = gathered(model.module.first.weight)
            with model.averaged():
                torch.testing.assert_close(model.module.first.weight, rows.mean(0))
                model.eval()
                model(torch.ones(2, 4))
                model.train()
            assert_equal_states(snapshot(model), before)
            with pytest.raises(ZeroDivisionError), model.averaged():
                raise ZeroDivisionError
            assert_equal_states(snapshot(model), before)
            model.consensus_distance()
    state = {name: tensor.float().numpy() for name, tensor in snapshot(model).items()}
    model.close()
    return state


def test_averaged_restores_everything_and_training_goes_on_bit_for_bit() -> None:
    looked, unseen = launch(train_and_look, True, world_size=5), launch(train_and_look, False, world_size=5)
    for with_look, without in zip(looked, unseen, strict=True):
        for name in without:
            assert np.array_equal(with_look[name], without[name]), name


def check_no_training_inside_averaged() -> None:
    model = GossipDataParallel(rank_module(), SGD, "ring")
    train(model, range(1))
    with model.averaged():
        loss = model(torch.ones(2, 4)).sum()
        for refused in (loss.backward, model.global_avg, model.idle_step):
            with pytest.raises(GossipError, match="leave the block first"):
                refused()


def test_averaged_refuses_training_inside() -> None:
    launch(check_no_training_inside_averaged, world_size=2)


def check_consensus_distance() -> None:
    model = GossipDataParallel(rank_module(), SGD, "ring", bucket_cap_mb=TINY_BUCKETS)
    assert max(model.consensus_distance()) < 1e-6
    train(model, range(4))
    rows = gathered(torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()]).double())
    distance = (rows - rows.mean(0)).square().sum(1).mean().sqrt().item()
    assert distance > 0
    wanted = (distance, distance / rows.mean(0).norm().item())
    assert model.consensus_distance() == pytest.approx(wanted, rel=1e-5)


def test_consensus_distance_is_its_definition() -> None:
    launch(check_consensus_distance, world_size=3)


# ------------------------------------------------------------------ mixing


def average_follows_all_reduce(name: str) -> np.ndarray:
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
    return rows.numpy()


@pytest.mark.parametrize("name", ["ring", "directed_ring", "star", "one_peer_exponential", "random_matching"])
def test_average_of_replicas_follows_all_reduce_exactly(name: str) -> None:
    launch(average_follows_all_reduce, name, world_size=4)


@dataclass
class EmptyExchange:
    message: torch.Tensor
    bytes_sent = 0

    def wait(self) -> torch.Tensor:
        return self.message.clone()


class RecordingTransport:
    """Sends nothing anywhere; remembers which round it was asked to carry."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int, Round]] = []

    def start(self, message: torch.Tensor, round_: Round, *, step: int, bucket: int) -> EmptyExchange:
        self.rounds.append((step, bucket, round_))
        return EmptyExchange(message)


def rounds_used() -> list[tuple[int, int, int]]:
    topology = build("one_peer_ring", 4)
    transport = RecordingTransport()
    model = GossipDataParallel(rank_module(), SGD, topology, bucket_cap_mb=TINY_BUCKETS, transport=transport)
    train(model, range(5))
    assert all(round_ is topology.round(step) for step, _, round_ in transport.rounds)
    model.close()
    return [(step, bucket) for step, bucket, _ in transport.rounds]


def test_rounds_count_from_0_without_a_skip_in_every_bucket() -> None:
    for used in launch(rounds_used, world_size=4):
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
    for weight in launch(half_precision_mixing, world_size=4):
        assert np.all(weight == float(torch.tensor(1 + 2**-7 * 1.5).bfloat16()))


def edit_between_steps() -> list[float]:
    module = nn.ParameterDict({"x": nn.Parameter(torch.zeros(3))})
    model = GossipDataParallel(module, None, "complete")
    with torch.no_grad():
        module["x"].fill_(float(model.rank))
    model.idle_step()
    model.load_state_dict({"x": torch.full((3,), 10.0 + model.rank)})
    model.idle_step()
    return module["x"].tolist()


def test_edits_between_launch_and_mix_survive() -> None:
    # 10 + rank was loaded over rank, whose mix moves it by mean - rank = 0.5 - rank.
    assert launch(edit_between_steps, world_size=2) == [[10.5] * 3, [10.5] * 3]


# ------------------------------------------------------------------ a world of one


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


def test_no_sync_accumulates_until_the_first_backward_outside() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    model = GossipDataParallel(copy.deepcopy(plain), SGD)
    batches = torch.randn(3, 5, 4)
    for batch in batches:
        plain(batch).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9).step()
    with model.no_sync():
        for batch in batches[:2]:
            model(batch).square().mean().backward()
    assert model.step == 0
    model(batches[2]).square().mean().backward()
    assert model.step == 1
    torch.testing.assert_close(model.module.weight, plain.weight)


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


def test_backward_that_died_is_noticed_at_the_next_forward() -> None:
    model = GossipDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), SGD, bucket_cap_mb=TINY_BUCKETS)
    inputs = torch.ones(1, 3, requires_grad=True)

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    inputs.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(inputs).sum().backward()
    with pytest.raises(GossipError, match="backward pass of step 0 was ended by an exception"):
        model(inputs)
