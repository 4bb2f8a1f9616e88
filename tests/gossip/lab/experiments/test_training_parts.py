"""The parts of a training: the order of the samples, whoever trains; loss and accuracy; learning rates."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composing import composed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from gossip.communication.world import World
from gossip.lab.experiments import evaluation, lr_schedules
from gossip.lab.experiments.evaluation import cross_entropy, evaluate, evaluate_replicas
from gossip.lab.experiments.experiment_build import build
from gossip.lab.experiments.partition import Shards
from gossip.lab.experiments.run_state import ElasticShards

HISTORY = [(0, 1, 2), (0, 2), (0, 2, 3), (2, 3, 4)]


def epoch(shards: Shards, rank: int, number: int) -> list[list[int]]:
    first = number * shards.steps_per_epoch
    return [shards.batch([rank], step).tolist() for step in range(first, first + shards.steps_per_epoch)]


def test_shards_lose_no_sample_over_the_epochs() -> None:
    shards = Shards([np.arange(0, 7), np.arange(7, 12)], batch_size=2, seed=0)
    assert (shards.steps_per_epoch, shards.left_out_per_epoch) == (2, 4)
    for rank, indices in enumerate(shards.indices):
        seen = [sample for number in range(20) for batch in epoch(shards, rank, number) for sample in batch]
        assert set(seen) == set(indices.tolist())


def test_shards_smaller_than_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 1 has only 5 samples, less than one batch of training\.batch_size=6"):
        Shards([np.arange(0, 7), np.arange(7, 12)], batch_size=6, seed=0)


def test_shards_repeat_small_ones_in_orders_of_their_own() -> None:
    shards = Shards([np.arange(0, 7), np.arange(7, 10)], batch_size=2, seed=0, repeats=True)
    assert (shards.steps_per_epoch, shards.left_out_per_epoch) == (2, 0)
    for rank, indices in enumerate(shards.indices):
        samples = [sample for step in range(21) for sample in shards.batch([rank], step).tolist()]
        passes = [samples[start : start + len(indices)] for start in range(0, len(samples), len(indices))]
        assert all(sorted(each) == indices.tolist() for each in passes)
        assert len({str(each) for each in passes}) > 1


def samples_of(experiment: Any, member: int) -> list[bytes]:
    """The samples of a member after it has trained among the ranks of its time, in the steps left of an epoch."""
    method = SimpleNamespace(world=SimpleNamespace(member=member))
    shards = ElasticShards(experiment, method)  # type: ignore[arg-type]
    for step, members in enumerate(HISTORY):
        if member in members:
            method.members = members
            shards.batch(step)
    rest = range(step, experiment.shards.steps_per_epoch)
    return [experiment.data.train_inputs[place].numpy().tobytes() for step in rest for place in shards.batch(step)]


@pytest.mark.parametrize("on_loss", ["redistribute", "leave"])
def test_ranks_that_joined_at_different_times_have_different_samples(on_loss: str) -> None:
    experiment = build(composed("launch.world_size=3", "wrapper.on_peer_loss=continue", f"data.on_loss={on_loss}"))
    of_members = [samples_of(experiment, member) for member in HISTORY[-1]]
    seen = [sample for samples in of_members for sample in samples]
    assert len(seen) > len(experiment.data.train_targets) / 2
    assert len(set(seen)) == len(seen)


def test_global_batch_is_held_whoever_trains() -> None:
    experiment = build(composed("launch.world_size=3", "wrapper.on_peer_loss=continue", "data.on_loss=hold"))
    methods = {member: SimpleNamespace(world=SimpleNamespace(member=member)) for member in range(5)}
    shards = {member: ElasticShards(experiment, method) for member, method in methods.items()}  # type: ignore[arg-type]
    for step, members in enumerate([(0, 1, 2), (0, 2), (0, 2, 3, 4), (4,), (0, 3)]):
        batches = []
        for member in members:
            methods[member].members = members
            batches.append(shards[member].batch(step))
        assert torch.equal(torch.cat(batches), experiment.shards.batch(range(3), step))
        assert max(map(len, batches)) - min(map(len, batches)) <= 1


@pytest.mark.parametrize("shape", [(1000,), (300, 7)], ids=["images", "text"])
def test_evaluate_is_the_mean_over_all_predictions(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, 5, generator=generator)
    targets = torch.randint(5, shape, generator=generator)
    module, modes = nn.Identity(), list[tuple[bool, bool]]()
    module.register_forward_hook(lambda *_: modes.append((module.training, torch.is_grad_enabled())))
    for world in (None, World(timedelta(seconds=5))):
        found = evaluate(module, logits, targets, world)
        assert found.accuracy == pytest.approx(float((logits.argmax(-1) == targets).double().mean()))
        assert found.loss == pytest.approx(float(cross_entropy(logits, targets)), rel=1e-5)
    assert len(modes) > 2
    assert set(modes) == {(False, False)}
    assert module.training


@pytest.mark.parametrize(("most_bytes", "of_one", "of_three"), [(240, 12, 4), (1, 1, 1)])
def test_evaluate_bounds_outputs(monkeypatch: pytest.MonkeyPatch, most_bytes: int, of_one: int, of_three: int) -> None:
    monkeypatch.setattr(evaluation, "_OUTPUT_BYTES", most_bytes)
    logits, targets = torch.randn(48, 5, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 5
    sizes: list[int] = []
    module = nn.Identity()
    module.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    every: Any = SimpleNamespace(world_size=3, module=module, every=lambda inputs: module(inputs).expand(3, -1, -1))
    found = [evaluate(module, logits, targets), *evaluate_replicas(every, logits, targets)]
    assert sizes == [1, *[of_one] * (48 // of_one), 1, *[of_three] * (48 // of_three)]  # the first to know the size
    assert [each.loss for each in found] == pytest.approx([float(cross_entropy(logits, targets))] * 4, rel=1e-5)


def rates(schedule: Callable[..., LambdaLR], total_steps: int, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedule(optimizer, total_steps, **options)
    found = []
    for _ in range(total_steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return [*found, scheduler.get_last_lr()[0]]


@pytest.mark.parametrize("schedule", [lr_schedules.constant, lr_schedules.linear, lr_schedules.cosine])
def test_schedules_warm_up_to_the_optimizers_rate(schedule: Callable[..., LambdaLR]) -> None:
    found = rates(schedule, 20, warmup_fraction=0.2)
    assert found[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert max(found) == pytest.approx(2.0)


def test_schedules_are_half_way_in_the_middle_and_end_where_they_should() -> None:
    assert rates(lr_schedules.constant, 10)[-1] == 2.0
    for schedule in (lr_schedules.linear, lr_schedules.cosine):
        assert rates(schedule, 10, final_fraction=0.5)[5] == pytest.approx(1.5)
        assert rates(schedule, 10)[-1] == pytest.approx(0.0)
        assert rates(schedule, 10, warmup_fraction=0.3, final_fraction=0.25)[-1] == pytest.approx(0.5)
    assert rates(lr_schedules.cosine, 12)[4] == pytest.approx(2.0 * 0.75)
