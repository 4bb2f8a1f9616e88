"""What arrives beyond what is usual is clipped, alike at both ends; a rank that is astray takes another one's state."""

import math
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankError, run_ranks
from tiers import rest_is_slow
from torch import nn
from wrong_ranks import WRONG, scale, train

import gossip
import topologies
from gossip import DistributedTransport, GossipDataParallel

NUM_STEPS = 30
JUMP_AT = 20
NUMEL = 3 * 2**15  # large enough for all-reduce, and of several blocks of int8's


def wrap(**options: Any) -> GossipDataParallel:
    """Two buckets of values that are only mixed, and pushed apart anew before every step."""
    model = nn.Module()
    model.first, model.second = (nn.Parameter(torch.zeros(NUMEL, dtype=torch.float64)) for _ in range(2))
    chosen = {"max_difference": "clip", "bucket_cap_mb": NUMEL * 8 / 2**20, "timeout": timedelta(seconds=60)}
    return GossipDataParallel(model, None, **chosen | options)


@torch.no_grad()
def push(model: GossipDataParallel, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * model.rank + step)
    for parameter in model.module.parameters():
        parameter.add_(torch.randn(NUMEL, generator=generator, dtype=torch.float64))
        if step == JUMP_AT and model.rank == WRONG:
            parameter.mul_(1000)


def sample(model: GossipDataParallel) -> np.ndarray:
    """Every 97th value, as of now."""
    return np.concatenate([p.detach().numpy()[::97] for _, p in model.named_parameters()])


def mix(options: Mapping[str, Any]) -> tuple[list[np.ndarray], list[tuple[int, float]]]:
    """Return the values that each exchange began with and led to, and what was clipped in it."""
    values, clipped = [], []
    with wrap(**options) as model:
        for step in range(NUM_STEPS):
            push(model, step)
            values.append(sample(model))
            model.idle_step()
            values.append(sample(model))
            stats = model.stats()
            clipped.append((stats.num_clipped, stats.mean_moved))
    return values, clipped


ON_WIRE = {"topology": "complete", "transport": partial(DistributedTransport, shares_memory=False)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    rest_is_slow(
        [
            {"topology": "ring", "compression": "int8"},
            {"topology": "star", "max_difference": 3.0},
            {"topology": topologies.build("ring", 4).then(topologies.build("complete", 4), after=JUMP_AT)},  # new edges
            {"topology": "one_peer_hypercube", "compression": "bf16"},
            ON_WIRE,
            {"topology": "ring", "on_peer_loss": "continue"},
        ],
        3,
    ),
)
def test_the_mean_is_exact_where_both_ends_clip(options: Mapping[str, Any]) -> None:
    values, clipped = zip(*run_ranks(mix, {"algorithm": "atc", **options}, world_size=4), strict=True)
    means = np.mean(np.array(values), 0)
    size = np.abs(np.array(values)).max()
    np.testing.assert_allclose(means[1::2], means[::2], atol=1e-12 * size)
    counts = np.array([[number for number, _ in rank] for rank in clipped])
    assert not counts[:, : JUMP_AT + 1].any()
    assert counts[WRONG, JUMP_AT + 1 :].any()
    assert counts.sum() == 2 * counts[WRONG].sum()
    assert not any(moved for rank in clipped for _, moved in rank)
    healthy = np.delete(np.array(values)[:, -1], WRONG, 0)
    assert np.abs(healthy).max() < 100


def test_what_the_mean_loses_along_directed_edges_is_counted() -> None:
    options = {"algorithm": "atc", "topology": "one_peer_exponential"}
    values, clipped = zip(*run_ranks(mix, options, world_size=4), strict=True)
    means = np.mean(np.array(values), 0)
    moved = np.linalg.norm(means[1::2] - means[::2], axis=1) * math.sqrt(97)
    counted = np.array([sum(rank[step][1] for rank in clipped) for step in range(1, NUM_STEPS)])  # one step later
    is_directed = np.arange(NUM_STEPS - 1) % 2 == JUMP_AT % 2
    is_after = np.arange(NUM_STEPS - 1) >= JUMP_AT
    assert ((counted > 0) == (is_directed & is_after)).all()
    assert (moved[:-1] <= 1.1 * counted + 1e-6).all()


REFUSED: Mapping[str, Mapping[str, Any]] = {
    "PushSum": {"algorithm": "push_sum"},
    "choco": {"compression": "choco"},
    "soft_deadline": {"soft_deadline": 1.0, "on_peer_loss": "continue"},
    "at least 1, got 0.5": {"max_difference": 0.5},
    "at least 1, got 'cut'": {"max_difference": "cut"},
}


def test_what_cannot_be_clipped_is_refused_by_name() -> None:
    for name, options in REFUSED.items():
        with pytest.raises(ValueError, match=f"max_difference.*{name}"):
            wrap(**{"topology": "ring", "timeout": timedelta(minutes=5)} | options)


def decaying(step: int) -> float:
    return max(0.0, 1 - step / 200)


@pytest.mark.slow
def test_a_fault_leaves_the_others_and_the_average_as_they_were() -> None:
    options = {"topology": "ring", "max_difference": "clip", "schedule": decaying, "on_peer_loss": "continue"}
    clean, faulty = (run_ranks(train, 200, fault, 50, options, world_size=4) for fault in (None, scale))
    losses = [sum(course.loss for place, course in enumerate(run) if place != WRONG) for run in (clean, faulty)]
    assert losses[1] < 1.02 * losses[0]
    assert faulty[0].accuracy > clean[0].accuracy - 0.5
    assert any("do not come back by being mixed" in text for text in faulty[WRONG].warnings)
    assert faulty[WRONG].loss < 2 * clean[WRONG].loss


def test_a_rank_that_is_astray_raises_where_nobody_can_be_joined() -> None:
    with pytest.raises(RankError, match=rf"rank {WRONG}: step 70, bucket 0: whatever arrived in 20 exchanges"):
        run_ranks(train, 80, scale, 50, {"topology": "ring", "max_difference": "clip"}, world_size=4)


def train_on(folder: str, first: int, last: int) -> list[torch.Tensor]:
    with wrap(topology="ring") as model:
        if first:
            gossip.load(model, folder)
        for step in range(first, last):
            push(model, step)
            model.idle_step()
        if last < NUM_STEPS:
            gossip.save(model, folder)
        return [parameter.detach().clone() for parameter in model.module.parameters()]


def test_what_is_usual_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = run_ranks(train_on, str(tmp_path), 0, NUM_STEPS, world_size=4)
    for first, last in ((0, JUMP_AT + 2), (JUMP_AT + 2, NUM_STEPS)):
        parts = run_ranks(train_on, str(tmp_path), first, last, world_size=4)
    for rank in range(4):
        for resumed, kept in zip(parts[rank], whole[rank], strict=True):
            assert torch.equal(resumed, kept)
