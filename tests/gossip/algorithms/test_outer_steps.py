"""Algorithms with outer steps and averages: alone, by parts, with delays, and what they refuse."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gossip
import topologies
from gossip import Algorithm, VirtualWorkers
from gossip.algorithms import AdaptWhileCommunicating, DiLoCo, NoLoCo, RelaySum, SlowMo, SparseLoCo, StreamingDiLoCo


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(period=3),
        DiLoCo(period=3, form="awc"),
        StreamingDiLoCo(period=3, parts=2, overlap=2),
        SlowMo(period=3, slow_lr=0.7),
        SparseLoCo(period=3, ratio=0.5, bits=4),
        NoLoCo(period=3),
        gossip.GASLoC(period=3),
        gossip.FactoredGossip(period=3, kappa=0.4),
    ],
    ids=lambda algorithm: algorithm.describe(),
)
def test_one_rank_makes_the_outer_steps_of_two_with_the_same_data(algorithm: Algorithm) -> None:
    torch.manual_seed(0)
    module, sgd = nn.Linear(3, 2).double(), partial(torch.optim.SGD, lr=0.1)
    inputs = torch.randn(9, 4, 3, dtype=torch.float64)
    found = []
    for count in (1, 2):
        options: dict[str, Any] = {"algorithm": algorithm, "bucket_cap_mb": 1e-6}
        workers = VirtualWorkers(module, count, sgd, "complete", devices=["cpu"], **options)
        for batch in inputs:
            workers(batch.repeat(count, 1)).square().mean().backward()
        found.append([stack.detach()[0].clone() for stack in workers.parameters()])
    alone = gossip.GossipDataParallel(copy.deepcopy(module), sgd, "complete", **options)
    for batch in inputs:
        alone(batch).square().mean().backward()
    found.append([parameter.detach().clone() for parameter in alone.parameters()])
    alone.close()
    for one, two, process in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
        torch.testing.assert_close(process, two, rtol=0, atol=1e-12)


def small(*, bucket_cap_mb: float = 1e-6, **options: Any) -> VirtualWorkers:
    """Four workers of a linear map, with a bucket for each of its two parameters."""
    torch.manual_seed(0)
    arguments = {"optimizer": partial(torch.optim.SGD, lr=0.1), "topology": "complete"} | options
    return VirtualWorkers(nn.Linear(3, 2).double(), 4, devices=["cpu"], bucket_cap_mb=bucket_cap_mb, **arguments)


def step(workers: VirtualWorkers, number: int) -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    workers(inputs).square().mean().backward()


def test_a_step_whose_learning_rate_is_0_applies_no_correction() -> None:
    workers = small(algorithm=gossip.FactoredGossip(period=4, kappa=0.4))
    for number in range(7):
        step(workers, number)
        workers.optimizer.param_groups[0]["lr"] = 0.1 * (number < 5)
        if number == 5:
            before = [stack.detach().clone() for stack in workers.parameters()]
    assert all(map(torch.equal, workers.parameters(), before))


FOLLOWERS = [gossip.FactoredGossip(period=10, kappa=0.4), gossip.IntegralCorrection(), SlowMo(period=10)]


@pytest.mark.parametrize("algorithm", FOLLOWERS, ids=lambda algorithm: algorithm.describe())
def test_a_rate_that_starts_again_from_nearly_0_does_not_blow_up(algorithm: Algorithm) -> None:
    workers = small(topology="ring", algorithm=algorithm)
    cycle = torch.optim.lr_scheduler.LambdaLR(workers.optimizer, lambda step: 1e-8 if step % 60 >= 50 else 1.0)
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = []
    for _ in range(360):
        loss = (workers(inputs) - inputs[:, :2].flip(0)).square().mean()
        loss.backward()
        cycle.step()
        losses.append(loss.item())
    assert max(losses) < 10


class Halving(torch.optim.Optimizer):
    """Has no learning rate."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


@pytest.mark.parametrize("defaults", [{}, {"lr": None}], ids=str)
@pytest.mark.parametrize("algorithm", FOLLOWERS, ids=lambda algorithm: algorithm.describe())
def test_an_optimizer_may_have_no_learning_rate(algorithm: Algorithm, defaults: dict[str, Any]) -> None:
    workers = small(optimizer=partial(Halving, defaults=defaults), algorithm=algorithm)
    before = [stack.detach().clone() for stack in workers.parameters()]
    step(workers, 0)
    step(workers, 1)
    for stack, was in zip(workers.parameters(), before, strict=True):
        assert torch.equal(stack.detach(), was / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outer", [None, partial(torch.optim.SGD, lr=0.5)])
def test_replicas_are_equal_after_a_weighted_outer_step(dtype: torch.dtype, outer: Any) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    algorithm = DiLoCo(period=2, weighted=True, outer=outer)
    workers = VirtualWorkers(nn.Linear(9, 9, dtype=dtype), 4, sgd, "complete", algorithm=algorithm, devices=["cpu"])
    for _ in range(2):
        workers.weigh([97, 1, 1, 1])
        workers(torch.randn(100, 9, dtype=dtype)[:8]).square().mean().backward()
    for stack in workers.parameters():
        torch.testing.assert_close(stack.detach(), stack.detach()[:1].expand_as(stack), rtol=1e-6, atol=1e-6)


def alone(algorithm: Algorithm, **options: Any) -> gossip.GossipDataParallel:
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.1)
    return gossip.GossipDataParallel(nn.Linear(3, 1).double(), sgd, "complete", algorithm=algorithm, **options)


def test_the_first_weight_leaves_the_outer_steps_that_were_made() -> None:
    found = []
    for weighs_at in (0, 4):
        model = alone(DiLoCo(period=2, weighted=True, outer=partial(torch.optim.Adam, lr=0.1)))
        for number in range(8):
            if number == weighs_at:
                model.weigh(8)
            if number < 4:
                model.idle_step()
            else:
                model(torch.ones(8, 3, dtype=torch.float64)).square().mean().backward()
        found.append(model.module.weight.tolist())
        model.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("step_in_backward", [True, False])
def test_idle_steps_count_no_samples(step_in_backward: bool) -> None:
    model = alone(DiLoCo(period=9, weighted=True), step_in_backward=step_in_backward)
    for _ in range(2):
        model.weigh(16)
        model(torch.ones(16, 3, dtype=torch.float64)).square().mean().backward()
        if not step_in_backward:
            model.optimizer.step()
        model.idle_step()
    (view,) = model._engine.exchanges.parameter_views()
    assert view.numbers["samples"].item() == pytest.approx(32)
    model.close()


@pytest.mark.parametrize("algorithm", [DiLoCo(period=2), SlowMo(period=2)], ids=lambda algorithm: algorithm.describe())
def test_outer_steps_go_on_from_values_that_are_loaded(algorithm: Algorithm) -> None:
    model = alone(algorithm)
    model.optimizer.param_groups[0]["lr"] = 0.0
    for number in range(9):
        if number == 3:
            model.load_state_dict({name: torch.full_like(value, 10) for name, value in model.state_dict().items()})
        model(torch.ones(8, 3, dtype=torch.float64)).square().mean().backward()
    assert all(torch.equal(value, torch.full_like(value, 10)) for value in model.state_dict().values())
    model.close()


def test_a_subclass_may_choose_the_outer_optimizer() -> None:
    class Mine(DiLoCo):
        def __init__(self) -> None:
            super().__init__(10, outer=partial(torch.optim.SGD, lr=0.5))

    assert Mine().describe().endswith("outer=SGD(lr=0.5))")


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(period=2, outer_momentum=0.0),
        SlowMo(period=2, slow_momentum=0.0),
        NoLoCo(period=2, outer_momentum=0.0),
        gossip.GASLoC(period=2),
        gossip.FactoredGossip(period=2, outer_momentum=0.0),
        StreamingDiLoCo(period=2, parts=1, overlap=1, outer_momentum=0.0),
        StreamingDiLoCo(period=2, parts=1, overlap=1, outer_momentum=0.0, eager=True),
        RelaySum(),
    ],
    ids=lambda algorithm: algorithm.describe(),
)
def test_an_average_of_everything_becomes_the_anchor(algorithm: Algorithm) -> None:
    workers = small(topology="path" if isinstance(algorithm, RelaySum) else "complete", algorithm=algorithm)
    for number in range(3):
        step(workers, number)
    workers.global_avg()
    means = [stack.detach().clone() for stack in workers.parameters()]
    workers.optimizer.param_groups[0]["lr"] = 0.0
    for number in range(4):
        step(workers, number)
    for mean, stack in zip(means, workers.parameters(), strict=True):
        torch.testing.assert_close(stack.detach(), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0, form="awc"),
        NoLoCo(period=2, outer_lr=1.0, outer_momentum=0.0, form="awc"),
        gossip.GASLoC(period=2, outer_momentum=0.0, form="awc"),
        gossip.FactoredGossip(period=2, outer_lr=1.0, outer_momentum=0.0, form="awc"),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_what_is_written_while_messages_are_on_their_way_is_kept(algorithm: Algorithm) -> None:
    workers = small(topology="complete", algorithm=algorithm)
    for number in range(4):
        step(workers, number)
    workers.optimizer.param_groups[0]["lr"] = 0.0
    before = [stack.detach().mean(0) for stack in workers.parameters()]
    with torch.no_grad():
        for stack in workers.parameters():
            stack.add_(1.0)
    for number in range(5):
        step(workers, number)
    for mean, stack in zip(before, workers.parameters(), strict=True):
        torch.testing.assert_close(stack.detach().mean(0), mean + 1.0, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("topology", "rounds"), [("complete", 1), ("one_peer_hypercube", 2)])
def test_factored_gossip_whose_rounds_are_exact_before_local_steps_begin_is_diloco(topology: str, rounds: int) -> None:
    idle, found = rounds - 1, []
    factored = gossip.FactoredGossip(3 + idle, form="atc", outer_lr=0.7, outer_momentum=0.9, rounds=rounds)
    for algorithm, graph in ((DiLoCo(3), "complete"), (factored, topology)):
        workers = small(algorithm=algorithm, topology=graph, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5))
        for number in range(12):
            if number % 3 == 0 and algorithm is factored:
                for _ in range(idle):
                    workers.idle_step()
            step(workers, number)
            if number == 10:
                found.append(torch.cat([stack.detach().flatten(1) for stack in workers.parameters()], 1))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def test_each_round_of_a_topology_mixes_moments_as_often_as_any_other() -> None:
    """Also where their period and the topology's have a common divisor: all ranks have the mean after one cycle."""
    algorithm = gossip.DESLOC(period=2).on(topology := topologies.build("one_peer_exponential", 8))
    for moment, every in algorithm.moments.items():
        sent = [number for number in range(6 * every) if algorithm.is_sent(moment, 2 * number + 1)]
        assert len(sent) == 6
        for cycle in (sent[:3], sent[3:]):
            product = np.linalg.multi_dot([topology.round(number).matrix() for number in cycle])
            np.testing.assert_allclose(product, 1 / 8, atol=1e-15)


ADAM = partial(torch.optim.Adam, lr=0.1)


def test_what_is_not_sent_costs_nothing() -> None:
    """Of moments between their exchanges, and of anchors that are equal as no outer step has been made."""
    size = 8 * 8  # of a linear map's values, in float64
    for algorithm, per_step in (
        (gossip.DESLOC(period=2), [0, 1, 0, 1, 0, 2, 0, 1, 0, 1, 0, 3]),
        (gossip.FactoredGossip(period=4, rounds=2, overlap=2), [0, 0, 0, 1, 0, 1, 0, 1]),
    ):
        workers, sent, foreseen = small(algorithm=algorithm, topology="one_peer_exponential", optimizer=ADAM), [], []
        for number in range(len(per_step)):
            step(workers, number)
            sent.append(workers.stats().bytes_sent)
            foreseen.append(workers.algorithm.messages_per_edge(number) if sent[-1] else 0)
        assert sent == [number * size for number in per_step]
        assert foreseen == per_step


def test_second_moments_stay_positive_whatever_rounding_makes_of_messages() -> None:
    moments = {"exp_avg_sq": 1}
    workers = small(algorithm=gossip.DESLOC(1, moments), topology="ring", optimizer=ADAM, compression="int4")
    for number in range(8):
        step(workers, number)
        assert all(bool((state["exp_avg_sq"] >= 0).all()) for state in workers.optimizer.state.values())


def test_moments_that_no_optimizer_keeps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'exp_avg_sq'., which the optimizer SGD .* moments=..momentum_buffer.: 3"):
        small(algorithm=gossip.DESLOC(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    with pytest.raises(
        ValueError, match=r"mixes \['exp_avg_sq'\], which the optimizer Adamax .* moments=..exp_avg.: 3"
    ):
        small(algorithm=gossip.DESLOC(), optimizer=torch.optim.Adamax)
    with pytest.raises(ValueError, match=r"moments must map .*, got \{'values': 1\}"):
        gossip.DESLOC(moments={"values": 1})


class Overtaking(AdaptWhileCommunicating):
    """Exchanges in every step what it combines two steps later."""

    overlap = 2


def test_messages_that_would_be_overtaken_are_not_lost_in_silence() -> None:
    workers = small(topology="ring", algorithm=Overtaking())
    step(workers, 0)
    with pytest.raises(gossip.GossipError, match=r"step 1, bucket 0: .* again before the messages of round 0"):
        step(workers, 1)
