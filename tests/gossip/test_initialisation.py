"""Whichever way torch.distributed was initialised, and over whichever backend, the wrapper trains."""

import functools
import itertools
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toy_backend
from covering import covering
from free_ports import free_port
from ranks import run_ranks
from replicas import SGD, TINY_BUCKETS, NormalisedNet, snapshot, train
from tiers import rest_is_slow

from gossip import GossipDataParallel, LaunchError, launch

TIMEOUT = timedelta(seconds=60)


def trained_state(group: dist.ProcessGroup | None = None, topology: str = "one_peer_exponential") -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank(group))
    model = GossipDataParallel(
        NormalisedNet(), SGD, topology, bucket_cap_mb=TINY_BUCKETS, process_group=group, timeout=TIMEOUT
    )
    train(model, range(3))
    model.global_avg()
    model.consensus_distance()
    train(model, range(3, 5))
    return list(snapshot(model).values())


@functools.cache
def state_by_rank(world_size: int, topology: str = "one_peer_exponential") -> list[list[torch.Tensor]]:
    """What the test session's own ranks have after training over all of them."""
    return run_ranks(trained_state, None, topology, world_size=world_size)


def assert_close(by_rank: list[list[torch.Tensor]], wanted: list[list[torch.Tensor]]) -> None:
    """Up to rounding: the number of torch's threads differs."""
    for ours, theirs in zip(by_rank, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other.to(one.dtype), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- init methods


def train_after(init_method: str) -> list[torch.Tensor]:
    dist.barrier()  # all have connected
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=TIMEOUT)
    return trained_state()


@pytest.mark.parametrize("init_method", ["tcp://127.0.0.1:{port}", "file://{folder}/store"])
def test_training_is_the_same_after_every_init_method(tmp_path: Path, init_method: str) -> None:
    init_method = init_method.format(port=free_port(), folder=tmp_path)
    assert_close(launch(train_after, init_method, world_size=3), state_by_rank(3))


def train_in_a_group_of(ranks: tuple[int, ...]) -> list[torch.Tensor]:
    group = dist.new_group(list(ranks))
    return trained_state(group) if dist.get_rank() in ranks else []


@pytest.mark.parametrize("ranks", [(2,), (0, 2)])
def test_training_in_an_existing_group(ranks: tuple[int, ...]) -> None:
    by_rank = run_ranks(train_in_a_group_of, ranks, world_size=3)
    assert_close([by_rank[rank] for rank in ranks], state_by_rank(len(ranks)))


# ---------------------------------------------------------------------- backends


BACKENDS = ("toy", "cpu:gloo", "cpu:toy,cuda:gloo")
TOPOLOGIES = ("complete", "one_peer_exponential", "star")
ROWS = list(covering(itertools.product(BACKENDS, (False, True), TOPOLOGIES)))
Reports = list[tuple[list[torch.Tensor], int]]


def train_over_each(rows: list[tuple[bool, str]]) -> Reports:
    reports: Reports = []
    for in_group, topology in rows:
        group = dist.new_group(list(range(dist.get_world_size()))) if in_group else None
        GossipDataParallel(torch.nn.Linear(2, 1), SGD, topology, compression="int8", process_group=group).close()
        made_before = toy_backend.num_made
        state = trained_state(group, topology)
        dist.barrier()
        reports.append((state, toy_backend.num_made - made_before))
    return reports


@functools.cache
def reports_over(backend: str) -> dict[tuple[bool, str], Reports]:
    """By row, what each rank reports; one set of processes makes all rows of a backend."""
    rows = [(in_group, topology) for other, in_group, topology in ROWS if other == backend]
    by_rank = launch(train_over_each, rows, world_size=4, backend=backend)
    return dict(zip(rows, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.xdist_group("backends")
@pytest.mark.parametrize(("backend", "in_group", "topology"), rest_is_slow(ROWS, 3))
def test_training_over_other_backends(backend: str, in_group: bool, topology: str) -> None:
    reports = reports_over(backend)[in_group, topology]
    for (state, num_made), expected in zip(reports, state_by_rank(4, topology), strict=True):
        for ours, theirs in zip(state, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        # A group that was given is used as it is.
        assert num_made == (1 if "toy" in backend and not in_group else 0)


@pytest.mark.parametrize("backend", ["mpi", "nccl"])
def test_backend_that_was_not_built_is_one_line(backend: str) -> None:
    if getattr(dist, f"is_{backend}_available")():
        pytest.skip(f"this torch has {backend}")
    refusal = rf"^backend '{backend}' is not built into this torch .*; it has gloo(, \w+)*$"
    with pytest.raises(ValueError, match=refusal):
        launch(trained_state, world_size=2, backend=backend)


def test_backend_that_nobody_registered_is_one_line() -> None:
    with pytest.raises(LaunchError) as caught:
        launch(trained_state, world_size=2, backend="glue")
    assert re.fullmatch(r"rank \d failed: .*glue", str(caught.value))
