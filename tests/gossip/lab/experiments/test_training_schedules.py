"""Learning rates over a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from gossip.lab.experiments import lr_schedules


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


def test_schedules_end_where_they_should() -> None:
    assert rates(lr_schedules.constant, 10)[-1] == 2.0
    for schedule in (lr_schedules.linear, lr_schedules.cosine):
        assert rates(schedule, 10)[-1] == pytest.approx(0.0)
        assert rates(schedule, 10, warmup_fraction=0.3, final_fraction=0.25)[-1] == pytest.approx(0.5)


def test_schedules_are_half_way_in_the_middle() -> None:
    for schedule in (lr_schedules.linear, lr_schedules.cosine):
        assert rates(schedule, 10, final_fraction=0.5)[5] == pytest.approx(1.5)
    assert rates(lr_schedules.cosine, 12)[4] == pytest.approx(2.0 * 0.75)


@pytest.mark.parametrize("option", ["warmup_fraction", "final_fraction"])
def test_schedules_refuse_a_fraction_out_of_range(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be between 0 and 1, got 1.5"):
        rates(lr_schedules.linear, 10, **{option: 1.5})
