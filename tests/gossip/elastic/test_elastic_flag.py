"""Loss scales and the last step of all are agreed on by those who are left, whomever a lost rank had told."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
import unsupervised
from elastic_ranks import NUM_MORE, flat, make_model, targets, train_until
from fault_places import injected
from tiers import rest_is_slow

from gossip.lab.faults.fault import Fault

NUMEL = 16


class Joined(NamedTuple):
    """What a rank that is left tells: its steps after each block, its members, and its parameters in the end."""

    num_steps: list[int]
    members: tuple[int, ...]
    mean: torch.Tensor


def train_unevenly(num_batches: tuple[tuple[int, ...], ...], fault: tuple[int, Fault] | None) -> Joined:
    """A block of join() for every entry of ``num_batches``, which says by rank how many batches it has."""
    rank = torch.distributed.get_rank()
    with injected([fault[1]] if fault is not None and fault[0] == rank else []):
        model = make_model(NUMEL, {"topology": "complete"})
        num_steps = []
        for numbers in num_batches:
            with model.join():
                for _ in range(numbers[rank]):
                    model(targets(rank, NUMEL)).backward()
            num_steps.append(model.step)
        model.global_avg()
        members, mean = model.members, flat(model.module)
        model.close()
    return Joined(num_steps, members, mean)


def run(num_batches: tuple[tuple[int, ...], ...], fault: tuple[int, Fault] | None = None) -> list[Joined | None]:
    with unsupervised.started(train_unevenly, num_batches, fault, world_size=len(num_batches[0])) as ranks:
        results: list[Joined | None] = ranks.results()
    told = [result for result in results if result is not None]
    for result in told:
        torch.testing.assert_close(result.mean, told[0].mean, rtol=0, atol=0)
        assert result.num_steps == told[0].num_steps
    return results


def test_all_make_as_many_steps_as_the_one_with_most_batches() -> None:
    results = run(((3, 9, 5), (4, 2, 2)))
    assert all(result is not None and result.num_steps == [9, 13] for result in results)


@pytest.mark.parametrize(("place", "step"), rest_is_slow([("telling", 6), ("sending", 8)]))
def test_those_left_end_together_when_the_one_with_most_batches_dies(place: Any, step: int) -> None:
    """It dies having told only one of the others of its step ("telling"): that step is made by all or by none."""
    results = run(((3, 4, 5, 20), (2, 2, 2, 2)), (3, Fault(place=place, step=step)))
    assert results[3] is None
    for result in results[:3]:
        assert result is not None
        assert result.members == (0, 1, 2)
        assert result.num_steps[0] in (max(5, step), max(5, step + 1))
        assert result.num_steps[1] == result.num_steps[0] + 2


def train_in_join() -> tuple[int, tuple[int, ...]]:
    """Steps and members in the end, of ranks with other numbers of batches; one joins them."""
    with make_model(NUMEL, {"topology": "ring"}) as model:
        with model.join():
            train_until(model, lambda: len(model.members) == 3, NUM_MORE + 5 * model.world.member)
        return model.step, model.members


def test_a_rank_that_joins_has_batches_of_its_own() -> None:
    with unsupervised.started(train_in_join, world_size=2) as ranks:
        ranks.join(train_in_join)
        results = ranks.results()
    assert {members for _, members in results} == {(0, 1, 2)}
    assert len({num_steps for num_steps, _ in results}) == 1


class Scaled(NamedTuple):
    """By step, the scale before it; and the parameters in the end."""

    scales: list[float]
    mean: torch.Tensor


def train_scaled(fault: Fault, in_backward: bool) -> Scaled:
    """The gradients of rank 2 overflow in step 5; the rank of the fault is the same."""
    rank = torch.distributed.get_rank()
    with injected([fault] if rank == 2 else []):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=6)
        model = make_model(NUMEL, {"topology": "ring", "scaler": scaler, "step_in_backward": in_backward})
        scales = []
        for step in range(16):
            scales.append(scaler.get_scale())
            scale = float("inf") if (rank, step) == (2, 5) else 1.0
            scaler.scale(model(targets(rank, NUMEL)) * scale).backward()
            if not in_backward:
                scaler.step(model.optimizer)
                scaler.update()
                model.optimizer.zero_grad()
        model.global_avg()
        mean = flat(model.module)
        model.close()
    return Scaled(scales, mean)


@pytest.mark.parametrize(("place", "in_backward"), rest_is_slow([("telling", True), ("sending", False)]))
def test_scales_are_those_of_all_who_are_left(place: Any, in_backward: bool) -> None:
    """An overflow that a rank told one of the others before it died halves the scales of all, or of none."""
    with unsupervised.started(train_scaled, Fault(place=place, step=5), in_backward, world_size=4) as ranks:
        results = [result for result in ranks.results() if result is not None]
    assert len(results) == 3
    for result in results:
        assert result.scales == results[0].scales
        assert torch.equal(result.mean, results[0].mean)
        assert result.mean.isfinite().all()
    if place != "sending":
        assert [later / earlier for earlier, later in itertools.pairwise(results[0].scales)].count(0.5) == 1
