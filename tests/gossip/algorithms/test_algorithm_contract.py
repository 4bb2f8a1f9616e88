"""Every algorithm against its dense recursion: virtual workers, real processes; state, sizes, modes."""

import copy
import functools
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy
import torch
from algorithm_table import ROWS, make_algorithm, make_topology, optimizer_for
from quadratics import LEARNING_RATE, NUM_VALUES, Problem, Sgd, constant, halved_at_four
from ranks import run_ranks
from sharded_models import Quadratic, values_of
from torch import nn

import gossip
from gossip import GossipDataParallel, GossipError, VirtualWorkers
from gossip.algorithms import VALUES, Algorithm, Arrived, BucketView
from gossip.compression import conversation
from gossip.step.state.algorithm_state import regroup

WORLD_SIZE = 5
NUM_STEPS = 9
SKIPPED = ((1, 3), (4, 6), (1, 7))
MAX_NORM = 0.5
TINY_BUCKETS = 1e-5


class Case(NamedTuple):
    """One way of using an algorithm: with a plain optimizer, bucket by bucket, where nothing else is said."""

    algorithm: str
    topology: str
    mode: str = ""
    skips: str = ""
    rate: str = ""

    @property
    def problem(self) -> Problem:
        return make_problem(SKIPPED if self.skips else ())

    @property
    def max_norm(self) -> float | None:
        return MAX_NORM if self.mode == "clipped" else None

    @property
    def rates(self) -> Callable[[int], float]:
        return halved_at_four if self.rate else constant

    @property
    def label(self) -> str:
        return "-".join(filter(None, self))


@functools.cache
def dense(case: Case) -> np.ndarray:
    sgd = Sgd(case.rates, ROWS[case.algorithm].momentum)
    return ROWS[case.algorithm].dense(case.problem, make_topology(case.topology, WORLD_SIZE), sgd, case.max_norm)


@functools.cache
def make_problem(skipped: tuple[tuple[int, int], ...]) -> Problem:
    return Problem(WORLD_SIZE, NUM_STEPS, skipped)


PLAIN = {name: Case(name, row.topologies[0]) for name, row in ROWS.items()}
# Each algorithm besides on the last of its topologies, with skipped updates and a rate that changes, in some mode.
CHANGED = [
    Case(name, row.topologies[-1], mode, "skipped", "rate")
    for (name, row), mode in zip(ROWS.items(), itertools.cycle(("", "clipped", "optimizer")), strict=False)
]
CASES = [*PLAIN.values(), *CHANGED]
OF_PROCESSES = [case for case in CASES if ROWS[case.algorithm].is_in_step]
# Virtual workers have one mode, and one count of updates, which Adam goes by, for one that skips an update as well.
VIRTUAL = [
    case._replace(
        mode=case.mode if case.mode == "clipped" else "",
        skips="" if ROWS[case.algorithm].momentum is None else case.skips,
    )
    for case in [
        *CASES,
        *(Case(name, topology, "clipped") for name, row in ROWS.items() for topology in row.topologies[1:-1]),
    ]
]
# What is kept, by its kind: tensors, the optimizer's, numbers, states of each neighbour, a message on its way for long.
RESTORED = (
    *("adam_tracking", "momentum_exchange", "push_sum", "push_sum(weighted)", "relay_sum", "sparse_loco"),
    *("streaming_diloco(eager)", "diloco(weighted)(awc)", "diloco(outer)"),
)
SGD = partial(torch.optim.SGD, lr=LEARNING_RATE)


def options_of(case: Case, world_size: int = WORLD_SIZE) -> dict[str, Any]:
    return {
        "optimizer": optimizer_for(case.algorithm),
        "topology": make_topology(case.topology, world_size),
        "algorithm": make_algorithm(case.algorithm),
        "clip_grad_norm": case.max_norm,
        "bucket_cap_mb": TINY_BUCKETS,
    }


def batch(problem: Problem, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all ranks; what is not finite makes a rank's gradients so."""
    spoilt = np.where(problem.is_updated(step), 0.0, np.nan)
    return torch.tensor(problem.matrices + spoilt[:, :, None]), torch.tensor(problem.targets)


# ------------------------------------------------------------------ messages that are rounded


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.keeps_mean])
def test_lossy_messages_keep_the_mean(name: str) -> None:
    topology = make_topology(ROWS[name].topologies[0], 6)
    algorithm = make_algorithm(name).on(topology)
    x = nn.Parameter(torch.randn(6, NUM_VALUES, dtype=torch.float64))
    optimizer = optimizer_for(name)([x])
    view = BucketView(x.data, [x], lambda flat: [flat], [optimizer])
    algorithm.begin(view)
    x.grad = torch.zeros_like(x)
    optimizer.step()
    view.follow_learning_rate()
    matrix = torch.tensor(topology.round(0).matrix())
    mean = view.values.mean(0)
    for _ in range(3):
        view.before = view.values.clone()
        algorithm.updated(view)
        got = {}
        for channel, message in algorithm.message(view).items():
            rounded = message.round(decimals=1)
            got[channel] = Arrived(matrix @ rounded - rounded)
        algorithm.arrive(view, got)
        for kept in view.kept.values():
            torch.testing.assert_close(kept.sum(0), torch.zeros_like(mean), rtol=0, atol=1e-13)
        torch.testing.assert_close(view.values.mean(0), mean, rtol=0, atol=1e-13)


# ------------------------------------------------------------------ virtual workers


def make_workers(case: Case, world_size: int = WORLD_SIZE) -> VirtualWorkers:
    given = options_of(case, world_size)
    return VirtualWorkers(Quadratic(case.problem.start), world_size, loss_reduction="sum", devices=["cpu"], **given)


def train_virtually(workers: VirtualWorkers, case: Case, steps: range) -> np.ndarray:
    for step in steps:
        workers.optimizer.param_groups[0]["lr"] = case.rates(step)
        if workers.algorithm.weighted:
            workers.weigh(case.problem.samples(step))
        workers(*batch(case.problem, step)).sum().backward()
    return torch.cat([stack.detach().flatten(1) for stack in workers.parameters()], 1).numpy()


@pytest.mark.parametrize("case", VIRTUAL, ids=lambda case: case.label)
def test_virtual_workers_make_the_dense_recursion(case: Case) -> None:
    actual = train_virtually(make_workers(case), case, range(NUM_STEPS))
    np.testing.assert_allclose(actual, dense(case), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ROWS)
def test_virtual_workers_are_restored_with_the_algorithms_state(name: str, tmp_path: Path) -> None:
    case = PLAIN[name]
    workers = make_workers(case)
    rows = train_virtually(workers, case, range(4)).copy()
    with workers.averaged() as module:
        mean = values_of(module)
    if ROWS[name].keeps_mean:
        np.testing.assert_allclose(mean.numpy(), rows.mean(0), rtol=0, atol=1e-14)
    gossip.save(workers, tmp_path)
    (view,) = workers._exchanges.views(0)
    counts = {key: float(number[0]) for key, number in view.numbers.items()}
    wanted = train_virtually(workers, case, range(4, NUM_STEPS))
    restored = make_workers(case)
    train_virtually(restored, case, range(2))
    gossip.load(restored, tmp_path)
    assert (train_virtually(restored, case, range(4, NUM_STEPS)) == wanted).all()
    larger = make_workers(case, world_size=8)
    gossip.load(larger, tmp_path)
    rows = torch.cat([stack.detach().flatten(1) for stack in larger.parameters()], 1)
    torch.testing.assert_close(rows, mean.expand_as(rows), rtol=0, atol=1e-14)
    for view in larger._exchanges.views(0):
        for key, kept in view.kept.items():
            assert larger.algorithm.keeps[key].resized == "mean" or not kept.any(), key
        for key, number in view.numbers.items():
            assert bool((number == (1 if key in larger.algorithm.numbers else counts[key])).all()), key


@pytest.mark.parametrize("name", ["push_sum", "push_sum(weighted)"])
def test_global_average_of_push_sum_is_weighted(name: str) -> None:
    case = Case(name, "pushed")
    rows = train_virtually(workers := make_workers(case), case, range(4))
    weights = case.problem.samples(0) if workers.algorithm.weighted else np.ones(WORLD_SIZE)
    matrix, weights = make_topology("pushed", WORLD_SIZE).round(0).matrix(), weights / weights.mean()
    for _ in range(3):
        weights = matrix @ weights
    assert np.abs(weights - 1).max() > 0.1
    with workers.averaged() as module:
        np.testing.assert_allclose(values_of(module).numpy(), (rows * weights[:, None]).mean(0), rtol=0, atol=1e-14)
    distance, _ = workers.consensus_distance()
    mean = (rows * weights[:, None]).mean(0)
    np.testing.assert_allclose(distance, np.sqrt(((rows - mean) ** 2).sum() / WORLD_SIZE), rtol=1e-12)


@pytest.mark.parametrize("topology", ["pushed", "ring", "one_peer_exponential"])
def test_weighted_push_sum_trains_as_on_the_pooled_batch(topology: str) -> None:
    """With gradients that do not depend on the values."""
    torch.manual_seed(0)
    chosen = make_topology(topology, WORLD_SIZE)
    push_sum, pooled = gossip.PushSum(weighted=True), nn.Linear(3, 2, bias=False, dtype=torch.float64)
    workers = VirtualWorkers(copy.deepcopy(pooled), WORLD_SIZE, SGD, chosen, algorithm=push_sum, loss_reduction="sum")
    optimizer, first = SGD(pooled.parameters()), case_samples(0).sum()
    for step in range(NUM_STEPS):
        samples, inputs = case_samples(step), torch.randn(WORLD_SIZE, 1, 3, dtype=torch.float64)
        workers.weigh(samples)
        workers(inputs).sum().backward()
        optimizer.zero_grad()
        (pooled(inputs).sum((1, 2)) @ torch.tensor(samples) / first).backward()
        optimizer.step()
        with workers.averaged() as module:
            torch.testing.assert_close(module.weight, pooled.weight, rtol=0, atol=1e-13)
    assert workers.consensus_distance()[0] > 1e-3


def test_steps_without_gradients_count_no_samples() -> None:
    diloco = gossip.DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0, weighted=True)
    workers = VirtualWorkers(nn.Linear(1, 1, bias=False), 2, SGD, "complete", algorithm=diloco, loss_reduction="sum")
    ((_, weight),) = workers.named_parameters()
    begun = weight.detach().clone()
    workers.weigh([1, 3])
    for inputs in ([[1.0], [2.0]], [[5.0]]):  # replica 1 has no sample in the second step
        workers(torch.tensor(inputs)).sum().backward()
    moved = LEARNING_RATE * torch.tensor([1.0 + 5.0, 2.0])
    mean = torch.tensor([1.0 + 1.0, 3.0]) @ moved / 5
    torch.testing.assert_close(weight.detach(), begun - mean)
    with GossipDataParallel(nn.Linear(1, 1), SGD, "complete", algorithm=gossip.DiLoCo(weighted=True)) as model:
        model.weigh(4)
        model(torch.ones(2, 1)).sum().backward()
        model.idle_step()
        assert float(model._engine.exchanges.views(0)[0].numbers["samples"]) == pytest.approx(4)


@pytest.mark.parametrize(
    ("algorithm", "kept"), [(gossip.DiLoCo(weighted=True), [1, 3]), (gossip.PushSum(weighted=True), [2, 5])]
)
def test_when_ranks_change_masses_begin_anew_and_samples_that_were_counted_stay(
    algorithm: Algorithm, kept: list[float]
) -> None:
    workers = VirtualWorkers(nn.Linear(3, 2), 2, SGD, "complete", algorithm=algorithm)
    workers.weigh([1, 3])
    workers(torch.ones(2, 3)).sum().backward()
    workers.weigh([2, 5])
    regroup(workers._exchanges)
    (view,) = workers._exchanges.views(0)
    torch.testing.assert_close(view.numbers["samples"].flatten(), torch.tensor(kept, dtype=torch.float64))


def test_ranks_are_weighed_only_where_they_can_be_and_then_always() -> None:
    def workers(algorithm: Algorithm) -> VirtualWorkers:
        return VirtualWorkers(nn.Linear(3, 2), 2, SGD, "complete", algorithm=algorithm)

    with pytest.raises(GossipError, match=r"^weigh\(\): algorithm AdaptThenCombine\(gamma=1\) counts all"):
        workers(gossip.AdaptThenCombine()).weigh([1, 2])
    with pytest.raises(GossipError, match=r"^algorithm PushSum\(weighted=True\) counts ranks .* call weigh\(samples\)"):
        workers(gossip.PushSum(weighted=True))(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"samples\[1\] must be above 0 and finite, got 0"):
        workers(gossip.PushSum(weighted=True)).weigh([1, 0])
    with pytest.raises(ValueError, match="one number for each of the 2 replicas, got 1"):
        workers(gossip.PushSum(weighted=True)).weigh([1])


def case_samples(step: int) -> np.ndarray:
    return PLAIN["push_sum"].problem.samples(step)


# ------------------------------------------------------------------ real processes


def make_model(case: Case) -> GossipDataParallel:
    in_backward = case.mode != "optimizer"
    return GossipDataParallel(Quadratic(case.problem.start), step_in_backward=in_backward, **options_of(case))


def train(model: GossipDataParallel, case: Case, steps: range) -> torch.Tensor:
    for step in steps:
        model.optimizer.param_groups[0]["lr"] = case.rates(step)
        matrices, targets = batch(case.problem, step)
        if model.algorithm.weighted:
            model.weigh(case.problem.samples(step)[model.rank])
        model.optimizer.zero_grad()
        model(matrices[model.rank], targets[model.rank]).backward()
        model.optimizer.step()
    model._engine.settle()
    return values_of(model.module)


def train_processes(folder: str) -> dict[str, list[Any]]:
    """By case: the values at the end; by what is restored, too: from its own file, the mean, from virtual workers."""
    found: dict[str, list[Any]] = {}
    pieces = mock.patch.object(conversation, "CHUNK_NUMEL", 2)  # so that buckets arrive in several parts
    pieces.start()
    for case in OF_PROCESSES:
        with make_model(case) as model:
            found[case.label] = train(model, case, range(NUM_STEPS)).tolist()
    for name in RESTORED:
        case = PLAIN[name]
        path, rest = Path(folder) / name, range(4, NUM_STEPS)
        with make_model(case) as model, make_model(case) as other:
            train(model, case, range(4))
            gossip.save(model, path)
            with model.averaged():
                mean = values_of(model.module).tolist()
            gossip.export(model, path.with_suffix(".safetensors"))
            wanted = train(model, case, rest)
            train(other, case, range(2))
            gossip.load(other, path)
            restored = train(other, case, rest)
            gossip.load(other, Path(folder) / "virtual" / name)
            begun_virtually = train(other, case, rest)
        found[f"restored {name}"] = [bool((wanted == restored).all()), mean, begun_virtually.tolist()]
    pieces.stop()
    return found


OfProcesses = tuple[Path, list[dict[str, list[Any]]]]


@pytest.fixture(scope="module")
def of_processes(tmp_path_factory: pytest.TempPathFactory) -> OfProcesses:
    folder = tmp_path_factory.mktemp("algorithms")
    for name in RESTORED:
        workers = make_workers(PLAIN[name])
        train_virtually(workers, PLAIN[name], range(4))
        gossip.save(workers, folder / "virtual" / name)
    return folder, run_ranks(train_processes, str(folder), world_size=WORLD_SIZE)


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_PROCESSES, ids=lambda case: case.label)
def test_processes_make_the_dense_recursion(case: Case, of_processes: OfProcesses) -> None:
    actual = np.array([found[case.label] for found in of_processes[1]])
    np.testing.assert_allclose(actual, dense(case), rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESTORED)
def test_processes_are_restored_from_their_own_files_and_from_those_of_virtual_workers(
    name: str, of_processes: OfProcesses
) -> None:
    by_rank = [found[f"restored {name}"] for found in of_processes[1]]
    assert all(is_the_same for is_the_same, _, _ in by_rank)
    actual = np.array([begun_virtually for _, _, begun_virtually in by_rank])
    np.testing.assert_allclose(actual, dense(PLAIN[name]), rtol=0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESTORED)
def test_virtual_workers_are_restored_from_the_files_of_processes(name: str, of_processes: OfProcesses) -> None:
    folder, by_rank = of_processes
    gossip.load(workers := make_workers(PLAIN[name]), folder / name)
    gossip.export(workers, folder / "virtual" / f"{name}.safetensors")
    for path in (folder / f"{name}.safetensors", folder / "virtual" / f"{name}.safetensors"):
        exported = safetensors.numpy.load_file(path)
        values = np.concatenate([exported["first"], exported["second"]])
        np.testing.assert_allclose(values, by_rank[0][f"restored {name}"][1], rtol=0, atol=1e-13)
    actual = train_virtually(workers, PLAIN[name], range(4, NUM_STEPS))
    np.testing.assert_allclose(actual, dense(PLAIN[name]), rtol=0, atol=1e-11)


# ------------------------------------------------------------------ refusals


class Reader(torch.optim.SGD):
    def pre_average_hook(self, *_: object) -> None:
        raise AssertionError


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"algorithm": "gradient_tracking", "topology": "pushed"},
        r'only column-stochastic.*algorithm="push_sum", which corrects for it',
    ),
    (
        {"algorithm": "exact_diffusion", "topology": "one_peer_exponential"},
        r"mixes by another matrix .* algorithm ExactDiffusion\(atc\) builds on",
    ),
    ({"algorithm": "relay_sum", "topology": "ring"}, "'ring' is not a tree"),
    ({"algorithm": "relay_sum", "topology": "path", "optimizer": Reader}, r"Reader\.pre_average_hook could be shown"),
    ({"algorithm": "diloco", "topology": "ring"}, r'does not average over all ranks .* choose topology="complete"'),
    ({"algorithm": "momentum_exchange"}, "SGD without momentum; take SGD with a momentum"),
    (
        {"algorithm": gossip.IntegralCorrection(second_moment="exchange")},
        'but the optimizer is SGD; choose one of these, or second_moment="local"',
    ),
    (
        {"algorithm": "quasi_global_momentum", "optimizer": partial(SGD, momentum=0.9)},
        "SGD without one, but the optimizer is SGD with momentum",
    ),
    ({"algorithm": "push_sum", "compression": "choco"}, r"compression choco.* cannot serve algorithm PushSum"),
    (
        {"algorithm": "push_sum", "topology": "pushed", "buffers": "average"},
        'buffers="average" needs a doubly stochastic topology',
    ),
    (
        {"algorithm": "extra", "compression": "choco"},
        r"choco\(.* delivers a part of a difference at a time.*int8 or int4",
    ),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_what_an_algorithm_cannot_work_with_is_refused(options: dict[str, Any], text: str) -> None:
    chosen = {"optimizer": SGD, "topology": "ring"} | options
    chosen["topology"] = make_topology(chosen["topology"], 4)
    with pytest.raises(ValueError, match=text):
        VirtualWorkers(nn.Linear(2, 1), 4, devices=["cpu"], **chosen)


def test_algorithm_whose_messages_are_not_what_it_says_is_refused() -> None:
    class Forgetful(Algorithm):
        sends = (VALUES, "more")

    with pytest.raises(ValueError, match=r"algorithm Forgetful has sends=.*'more'.*, but its message\(\) returns"):
        GossipDataParallel(nn.Linear(2, 1), SGD, algorithm=Forgetful())
