"""Ranks that continue without lost ones, simulated: schedules of faults, checked after every event."""

from __future__ import annotations

import pytest
from elastic_simulator.fault_schedules import simulate
from loguru import logger

NUM_SCHEDULES, NUM_BLOCKS = 3000, 20
SIZE = NUM_SCHEDULES // NUM_BLOCKS


@pytest.fixture(autouse=True)
def quiet() -> object:
    logger.disable("gossip")
    yield
    logger.enable("gossip")


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, SIZE))
def test_whatever_happens_to_ranks(first: int) -> None:
    """``python -m elastic_simulator SEED``, in tests/helpers, shows what happens in one of them."""
    for seed in range(first, first + SIZE):
        try:
            simulate(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_seed_stands_for_the_same_events() -> None:
    for seed in range(20):
        first, again = simulate(seed), simulate(seed)
        assert (first.scheduler.num_events, first.scheduler.now) == (again.scheduler.num_events, again.scheduler.now)
        assert first.record.generations == again.record.generations
        assert first.record.mixed == again.record.mixed
