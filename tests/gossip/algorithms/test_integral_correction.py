"""The gains of integral correction, steps that do nothing, and corrections of what codecs lose."""

from functools import partial

import numpy as np
import pytest
import torch
from tiers import rest_is_slow
from torch import nn

import gossip
import topologies
from gossip import Algorithm, Compression, VirtualWorkers
from gossip.algorithms import Arrived, BucketView, ExactDiffusion, IntegralCorrection
from gossip.algorithms.base import Form
from topologies import Round, Topology


@pytest.mark.parametrize(
    ("world_size", "steps_to_mix"),
    [(16, 4), (48, 6)],  # the latter is never exact, and takes a period at least
)
def test_gains_on_schedules_that_change_follow_the_steps_to_mix(world_size: int, steps_to_mix: int) -> None:
    schedule = topologies.build("one_peer_exponential", world_size)
    awc, atc = (IntegralCorrection(form).on(schedule).gains(7) for form in ("awc", "atc"))
    assert awc == pytest.approx((1 - 1 / (8 * steps_to_mix), 1 / (4 * steps_to_mix)))
    assert atc == pytest.approx((1 - 1 / (4 * steps_to_mix), 1 / (2 * steps_to_mix)))
    seldom = IntegralCorrection("atc").on(schedule.every(5)).gains(7)
    assert seldom == pytest.approx((1 - 1 / (20 * steps_to_mix), 1 / (10 * steps_to_mix)))


def test_gains_follow_the_rate_without_a_period_and_beside_quasi_global_momentum() -> None:
    for schedule, algorithm in (
        (topologies.build("random_matching", 16), IntegralCorrection("atc")),
        (topologies.build("ring", 8), gossip.QuasiGlobalIntegral(form="atc")),
    ):
        gamma, kappa = algorithm.on(schedule).gains(0)
        rate = topologies.analysis.consensus_rate(schedule)
        assert kappa == pytest.approx(-np.log(rate) / 2, rel=1e-2)  # the steps to mix have three digits
        assert gamma == 1 - kappa / 2


def test_gains_on_static_symmetric_topologies_are_the_textbooks() -> None:
    for form in ("awc", "atc"):
        assert IntegralCorrection(form).on(topologies.build("torus", 12)).gains(3) == (0.5, 0.5)
        assert IntegralCorrection(form).on(topologies.build("ring", 6).every(4)).gains(3) == (0.5, 0.125)


def test_each_phase_of_a_schedule_has_its_own_gains() -> None:
    ring, matching = topologies.build("ring", 8), topologies.build("one_peer_exponential", 8)
    algorithm = IntegralCorrection("atc").on(ring.then(matching, after=10))
    assert [algorithm.gains(step) for step in (0, 9)] == [(0.5, 0.5)] * 2
    assert [algorithm.gains(step)[1] for step in (10, 1000)] == [pytest.approx(1 / 6)] * 2
    assert algorithm.describe() == (
        "IntegralCorrection(atc: gamma=0.5 kappa=0.5, gamma=0.916667 kappa=0.166667 from round 10)"
    )


def test_given_gains_are_taken() -> None:
    schedule = topologies.build("one_peer_exponential", 16)
    assert IntegralCorrection(gamma=0.7, kappa=0.1).on(schedule).gains(0) == (0.7, 0.1)
    assert IntegralCorrection(kappa=0.1).on(schedule).gains(0) == (0.95, 0.1)
    assert IntegralCorrection(gamma=0.7).on(schedule).gains(0) == (0.7, 1 / 16)
    assert IntegralCorrection("atc").on(topologies.build("complete", 1)).gains(0) == (1.0, 0.0)


def test_topology_that_never_brings_all_ranks_together_is_refused() -> None:
    halves = Topology.from_rounds([Round.from_groups(4, [[0, 1], [2, 3]])])
    for algorithm in (IntegralCorrection(), gossip.FactoredGossip(kappa=0.4)):
        with pytest.raises(ValueError, match="never brings all ranks together"):
            algorithm.on(halves)


def test_gain_of_local_steps_is_shared_by_the_outer_steps_in_which_a_schedule_mixes() -> None:
    algorithms = [gossip.FactoredGossip(rounds=rounds, kappa=0.4) for rounds in (1, 2, 4, 8)]
    schedule = topologies.build("one_peer_exponential", 16)
    assert [each.on(schedule).gain for each in algorithms] == pytest.approx([0.1, 0.2, 0.4, 0.4])
    assert algorithms[2].on(schedule, delivers=0.5).gain == pytest.approx(0.2)


EIGENVALUES = torch.linspace(-0.98, 0.98, 50, dtype=torch.float64)
SHARES = torch.tensor([0.05, 0.2, 0.5, 0.8, 0.95], dtype=torch.float64)


def what_is_left_of_modes(algorithm: Algorithm, steps: torch.Tensor, num_steps: int = 1_000) -> torch.Tensor:
    """Of 1, in the mode of each eigenvalue of a static W, where learning rate times curvature is ``steps``."""
    x = nn.Parameter(torch.ones_like(steps))
    optimizer = torch.optim.SGD([x], lr=1.0)
    view = BucketView(x.data, [x], lambda flat: [flat.view(x.shape)], [optimizer])
    algorithm.begin(view)
    got = None
    for _ in range(num_steps):
        x.grad = steps * x.data
        if got is not None and not algorithm.before_forward:
            algorithm.arrive(view, got)
        optimizer.step()
        view.follow_learning_rate()
        algorithm.updated(view)
        got = {"values": Arrived((EIGENVALUES - 1) * view.values)}
        if algorithm.before_forward:
            algorithm.arrive(view, got)
    return x.data.abs()


@pytest.mark.parametrize("topology", rest_is_slow(["ring", "one_peer_hypercube", "random_matching"]))
@pytest.mark.parametrize(
    ("form", "gossip"), [("awc", gossip.AdaptWhileCommunicating()), ("atc", gossip.AdaptThenCombine())]
)
def test_default_gains_are_stable_wherever_gossip_is(form: Form, gossip: Algorithm, topology: str) -> None:
    of_gossip = 1 + EIGENVALUES if form == "awc" else 1 + 1 / EIGENVALUES.abs()
    limits = torch.minimum(of_gossip, torch.tensor(2.0))  # the mean over ranks is gradient descent
    algorithm = IntegralCorrection(form).on(topologies.build(topology, 16))
    for share in SHARES:
        assert float(what_is_left_of_modes(algorithm, share * limits).max()) < 1
    if topology == "ring":  # gossip itself depends on none
        assert float(what_is_left_of_modes(gossip, 0.99 * limits).max()) < 1
        assert float(what_is_left_of_modes(gossip, 1.01 * of_gossip).min()) > 1


STATEFUL: list[Algorithm] = [
    IntegralCorrection("awc"),
    IntegralCorrection("atc"),
    ExactDiffusion(),
    gossip.MomentumTracking("awc"),
    gossip.MomentumTracking("atc"),
    gossip.QuasiGlobalIntegral(form="awc"),
    gossip.QuasiGlobalIntegral(form="atc"),
]


def train(algorithm: Algorithm, rates: list[float]) -> np.ndarray:
    """What workers with different data end with, [n, numel]; each has the same batch in every step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    workers = VirtualWorkers(module, 5, partial(torch.optim.SGD, lr=0.1), "ring", algorithm=algorithm, devices=["cpu"])
    inputs = torch.randn(10, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for rate in rates:
        workers.optimizer.param_groups[0]["lr"] = rate
        (workers(inputs) - 1).square().mean().backward()
    return torch.cat([stack.detach().flatten(1) for stack in workers.parameters()], 1).numpy()


@pytest.mark.parametrize("algorithm", STATEFUL, ids=lambda each: each.describe())
def test_steps_with_a_rate_of_zero_do_nothing_and_lose_nothing(algorithm: Algorithm) -> None:
    """What was on its way arrives in the first of them."""
    one, three = (train(algorithm, [0.1] * 4 + [0.0] * number + [0.05] * 4) for number in (1, 3))
    np.testing.assert_allclose(three, one, rtol=0, atol=1e-13)
    assert np.ptp(one, axis=0).max() > 1e-3
    assert np.abs(train(algorithm, [0.1] * 4 + [0.0] + [0.1] * 4) - one).max() > 1e-3


@pytest.mark.parametrize("form", ["awc", "atc"])
def test_correction_follows_the_learning_rate_of_each_group(form: Form) -> None:
    """A group that stands still for a while, beside one that goes on, in parts of one bucket."""

    def run(rates: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
        torch.manual_seed(0)
        module = Two()

        def make_sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.SGD:
            return torch.optim.SGD([{"params": [parameter]} for _, parameter in named], lr=0.1)

        workers = VirtualWorkers(module, 4, make_sgd, "ring", algorithm=IntegralCorrection(form), devices=["cpu"])
        for pair in rates:
            for group, rate in zip(workers.optimizer.param_groups, pair, strict=True):
                group["lr"] = rate
            workers(torch.arange(4.0, dtype=torch.float64)).sum().backward()
        first, second = (stack.detach().numpy().copy() for stack in workers.parameters())
        return first, second

    together, apart = run([(0.1, 0.1)] * 9), run([(0.1, 0.1)] * 4 + [(0.0, 0.1)] * 2 + [(0.1, 0.1)] * 3)
    shorter = run([(0.1, 0.1)] * 4 + [(0.0, 0.0)] * 2 + [(0.1, 0.1)] * 3)
    np.testing.assert_allclose(apart[1], together[1], rtol=0, atol=1e-13)
    np.testing.assert_allclose(apart[0], shorter[0], rtol=0, atol=1e-13)


class Two(nn.Module):
    """Two parameters of one bucket, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        return sum(((parameter - target[:, None]) ** 2).sum(-1) for parameter in (self.first, self.second))


NUM_RANKS, NUM_VALUES = 8, 64


class Quadratic(nn.Module):
    """0.5 |x - optimum|^2, each rank's optimum another one."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(0)))

    def forward(self, optima: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((self.x - optima) ** 2).sum(-1)


def distances(
    algorithm: Algorithm | str, topology: str, compression: Compression | str | None, num_steps: int
) -> tuple[float, float]:
    """In the second half of the steps, at worst: of a replica from their mean, and of the mean from the optimum."""
    workers = VirtualWorkers(
        Quadratic(),
        NUM_RANKS,
        partial(torch.optim.SGD, lr=0.1),
        topology,
        algorithm=algorithm,
        compression=compression,
        devices=["cpu"],
    )
    optima = torch.randn(NUM_RANKS, NUM_VALUES, generator=torch.Generator().manual_seed(1))
    (stack,) = workers.parameters()
    spread = error = 0.0
    for step in range(num_steps):
        workers(optima).mean().backward()
        if step >= num_steps // 2:
            mean = stack.detach().double().mean(0)
            spread = max(spread, float((stack.detach() - mean).norm(dim=1).max()))
            error = max(error, float((mean - optima.double().mean(0)).norm()))
    return spread, error


CHOCO = {sparsifier: gossip.Choco(sparsifier=sparsifier) for sparsifier in ("top_k", "sign")}
FLOORS: list[tuple[str, Compression | str | None, int, float]] = [
    ("ring", "bf16", 300, 3e-2),  # the values' own resolution, 2^-8 of each, for 64 of them
    ("one_peer_exponential", "int4", 300, 1e-5),
    ("ring", CHOCO["top_k"], 600, 1e-2),
    ("ring", CHOCO["sign"], 600, 1e-2),
]
FORMS = [IntegralCorrection("awc"), IntegralCorrection("atc")]


@pytest.mark.parametrize(
    ("algorithm", "topology", "compression", "num_steps", "floor"),
    [(FORMS[number % 2], *row) for number, row in enumerate(FLOORS)],
)
def test_corrected_replicas_end_as_near_as_the_codec_can_tell(
    algorithm: Algorithm, topology: str, compression: Compression | str | None, num_steps: int, floor: float
) -> None:
    """Those of gossip end 1 to 5 apart, as their data are."""
    spread, error = distances(algorithm, topology, compression, num_steps)
    assert spread < floor
    assert error < 5e-5
