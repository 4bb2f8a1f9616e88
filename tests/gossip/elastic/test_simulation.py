"""Ranks that continue without lost ones, simulated: schedules of faults, checked after every event."""

import pytest
from elastic_simulator.fault_schedules import KINDS, Fault, FaultSchedule, Simulation, simulate
from elastic_simulator.put_back import FAULTS
from elastic_simulator.simulated_ranks import Settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loguru import logger

NUM_SCHEDULES, NUM_BLOCKS = 3000, 20
SIZE = NUM_SCHEDULES // NUM_BLOCKS
COMMON = [number for number, fault in enumerate(FAULTS) if fault.is_common]


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


_faults = st.builds(
    Fault,
    kind=st.sampled_from(KINDS),
    at=st.floats(0.0, 0.3),
    process=st.integers(0, 3),
    other=st.integers(0, 3),
    lasts_s=st.sampled_from([0.02, 0.5, 2.5]),
    key=st.sampled_from(["", "proposal/1", "vote/1", "decision/1", "proposal/2"]),
    who=st.frozensets(st.integers(0, 3), min_size=1, max_size=3),
)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), faults=st.lists(_faults, max_size=3), min_ranks=st.sampled_from([None, 1]))
def test_whatever_happens_to_four_ranks(seed: int, faults: list[Fault], min_ranks: int | None) -> None:
    """Hypothesis finds the shortest schedule in which something is wrong."""
    trained = Settings(4, num_steps=5, step_s=0.01, min_ranks=min_ranks)
    Simulation(FaultSchedule(seed, trained, faults)).run()


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_faults_can_be_put_back(number: int) -> None:
    """The table is of the library as it is."""
    with FAULTS[number].there():
        pass


@pytest.mark.slow
@pytest.mark.parametrize("number", COMMON)
def test_faults_that_are_put_back_are_found(number: int) -> None:
    """Others need thousands of schedules."""
    with FAULTS[number].there():
        assert any(map(is_found_by, FAULTS[number].seeds))


def is_found_by(seed: int) -> bool:
    try:
        simulate(seed)
    except Exception:
        return True
    return False


def test_a_seed_stands_for_the_same_events() -> None:
    for seed in range(20):
        first, again = simulate(seed), simulate(seed)
        assert (first.scheduler.num_events, first.scheduler.now) == (again.scheduler.num_events, again.scheduler.now)
        assert first.record.generations == again.record.generations
        assert first.record.mixed == again.record.mixed
