"""Replicas that are sharded over groups of ranks against the dense recursion of the groups, for every algorithm."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from algorithm_table import ROWS, make_algorithm, make_topology, optimizer_for
from quadratics import Problem, Sgd, constant
from ranks import run_ranks
from sharded_models import MeshShape, Quadratic, batch, make_sharded, values_of
from tiers import rest_is_slow

from gossip import GossipDataParallel

NUM_STEPS = 7
MAX_NORM = 0.5
SHAPES: tuple[MeshShape, ...] = ((2, 2), (3, 2), (2, 3), (1, 4), (4, 1))
SHARDS = ("fsdp", "optimizer", "none")
MODES: dict[str, dict[str, Any]] = {
    "bucketwise": {},
    "clipped": {"clip_grad_norm": MAX_NORM},
    "optimizer": {"step_in_backward": False},
}
# What sparse_loco sends are the largest values of a bucket, and a shard has buckets of its own.
ALGORITHMS = [name for name, row in ROWS.items() if row.is_in_step and not name.startswith("sparse_loco")]


class Case(NamedTuple):
    """A run: groups and ranks in each, how these share a replica, and how it trains."""

    shape: MeshShape
    shard: str
    algorithm: str
    topology: str
    mode: str

    @property
    def problem(self) -> Problem:
        """One row for each group."""
        return Problem(self.shape[0], NUM_STEPS)

    @property
    def label(self) -> str:
        return f"{self.shape[0]}x{self.shape[1]}-{self.shard}-{self.algorithm}-{self.topology}-{self.mode}"


def _is_tried(shard: str, name: str, topology: str, num_groups: int) -> bool:
    """One group alone never exchanges, so that what an exchange would bring it to (an outer step) does not happen."""
    if shard == "none" and is_refused_undivided(name):
        return False
    return (num_groups > 1 or ROWS[name].keeps_mean) and (topology != "pushed" or num_groups >= 3)


def is_refused_undivided(name: str) -> bool:
    """Whether an algorithm reads whole messages, which no rank of a group has sent."""
    algorithm = make_algorithm(name)
    return bool(algorithm.numbers) or algorithm.reads_sent or algorithm.requires.stochastic != "doubly"


def _cases() -> Iterator[Case]:
    """Each algorithm where ranks share a message, and in one of the ways in which each has its own."""
    for number, name in enumerate(ALGORITHMS):
        for shard in (SHARDS[number % 2], "none"):
            shapes = itertools.product(MODES, SHAPES[:3], ROWS[name].topologies)
            rows = [
                Case(shape, shard, name, topology, mode)
                for mode, shape, topology in shapes
                if _is_tried(shard, name, topology, shape[0])
            ]
            if rows:
                yield rows[number * 17 % len(rows)]


CASES = list(_cases())


def train(case: Case) -> tuple[torch.Tensor, torch.Tensor, float | None]:
    """This group's values after the run, their average over groups, and the last norm."""
    problem = case.problem
    module, options = make_sharded(Quadratic(problem.start), case.shape, case.shard)
    with GossipDataParallel(
        module,
        optimizer_for(case.algorithm),
        make_topology(case.topology, case.shape[0]),
        algorithm=make_algorithm(case.algorithm),
        bucket_cap_mb=1e-5,
        **options,
        **MODES[case.mode],
    ) as model:
        group, place = divmod(dist.get_rank(), case.shape[1])
        for step in range(NUM_STEPS):
            if model.algorithm.weighted:
                model.weigh(problem.samples(step)[group])
            model(*batch(problem, group, place, case.shape[1])).backward()
            if case.mode == "optimizer":
                model.optimizer.step()
                model.zero_grad()
        model.state_dict()  # combines what is to be combined before the values are read
        values = values_of(module)
        with model.averaged():
            average = values_of(module)
        assert torch.equal(values_of(module), values)
        return values, average, model.grad_norm


@pytest.mark.parametrize("case", rest_is_slow(CASES, 8), ids=lambda case: case.label)
def test_shard_groups_make_the_dense_recursion_of_groups(case: Case) -> None:
    found = run_ranks(train, case, world_size=case.shape[0] * case.shape[1])
    sgd = Sgd(constant, ROWS[case.algorithm].momentum)
    topology = make_topology(case.topology, case.shape[0])
    wanted = ROWS[case.algorithm].dense(case.problem, topology, sgd, MAX_NORM if case.mode == "clipped" else None)
    for rank, (values, _, norm) in enumerate(found):
        group = rank // case.shape[1]
        np.testing.assert_allclose(values.numpy(), wanted[group], rtol=0, atol=1e-11)
        assert norm == found[group * case.shape[1]][2], "the norm is the group's"
