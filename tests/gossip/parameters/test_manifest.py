"""What is compared before the first exchange, and what a missing rank is told after its time-out."""

from __future__ import annotations

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from replicas import (
    SGD,
)
from torch import nn

import topologies
from gossip import ExchangeError, GossipDataParallel, GossipError, ManifestError, World
from topologies import Round, Topology


def three_phases(odd: bool) -> Topology:
    """A composition with a function that has no end to compare; on the odd rank it gives another round 7."""

    def pair(t: int) -> Round:
        return Round.from_groups(3, [(0, 1) if odd and t == 7 else (1, 2)])

    warm_up = topologies.build("complete", 3).then(Topology.from_function(pair, name="own"), after=50)
    return warm_up.then(topologies.build("ring", 3).every(2), after=100)


def odd_one_out(what: str) -> str:
    """What every rank is told when rank 2 differs."""
    odd = dist.get_rank() == 2
    module: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    topology: Topology | str = "ring"
    bucket_cap_mb, optimizer = 25.0, SGD
    if odd and what == "shape":
        module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    if odd and what == "dtype":
        module[1].double()
    if odd and what == "order":
        module = nn.Sequential(nn.Linear(3, 2), nn.Linear(4, 3))
    if odd and what == "buffer":
        module.register_buffer("mean", torch.zeros(2))
    if odd and what == "frozen":
        module[0].weight.requires_grad_(False)
    if odd and what == "topology":
        topology = "complete"
    if what == "phases":
        topology = three_phases(odd)
    if odd and what == "bucket_cap_mb":
        bucket_cap_mb = 1.0
    if odd and what == "optimizer":
        optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
    if odd and what == "refused":
        topology = "hypercube"
    with pytest.raises((ManifestError, ValueError)) as caught:
        GossipDataParallel(module, optimizer, topology, bucket_cap_mb=bucket_cap_mb)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("shape", ["parameter 1 is '0.weight' float32 [3, 4]", "on rank 0, but '0.weight' float32 [5, 4]"]),
        ("dtype", ["parameter 3 is '1.weight' float32", "but '1.weight' float64"]),
        ("order", ["parameter 1 is '0.weight' float32 [3, 4]", "but '0.weight' float32 [2, 3]"]),
        ("buffer", ["buffer 1 is nothing on rank 0, but 'mean' float32 [2]"]),
        ("frozen", ["parameter 1 is '0.weight'", "frozen on rank 2"]),
        ("topology", ["topology is", "ring", "on rank 0, but", "complete"]),
        ("phases", ["topology is from round 0, every 1: {", "from round 50, every 1: Topology('own'", "[[0, 1]]"]),
        ("bucket_cap_mb", ["bucket_cap_mb is 25 on rank 0, but 1 on rank 2"]),
        ("optimizer", ["optimizer 1 is SGD on rank 0, but AdamW on rank 2"]),
    ],
)
def test_manifest_difference_is_named_on_every_rank(what: str, texts: list[str]) -> None:
    messages = run_ranks(odd_one_out, what, world_size=3)
    assert len(set(messages)) == 1
    assert "rank 2" in messages[0]
    for text in texts:
        assert text in messages[0]


def test_manifest_tells_the_others_what_one_rank_refused() -> None:
    first, second, odd = run_ranks(odd_one_out, "refused", world_size=3)
    assert first == second
    assert "on rank 2" in first
    assert "hypercube" in first
    assert "hypercube" in odd


LENGTHS = ((0, 0, 0), (0, 2, 4), (247, 248, 1), (249, 0, 248), (1, 300, 1000))  # 248 travel with the length


def gather_words() -> list[list[bytes]]:
    world = World(timedelta(seconds=60))
    found = [world.gather_bytes((bytes(range(256)) * 4)[: lengths[world.rank]], "testing") for lengths in LENGTHS]
    world.close()
    return found


def test_bytes_of_any_length_are_gathered() -> None:
    wanted = [[(bytes(range(256)) * 4)[:length] for length in lengths] for lengths in LENGTHS]
    assert run_ranks(gather_words, world_size=3) == [wanted] * 3


def stop_early(topology: str, num_inputs: int) -> str:
    """Rank 1 makes one step, the others try to make three: what they are told."""
    inputs = torch.ones(1, num_inputs)
    model = GossipDataParallel(nn.Linear(num_inputs, 60), SGD, topology, timeout=timedelta(seconds=2))
    model(inputs).sum().backward()
    text = "stopped"
    if model.rank != 1:
        model(inputs).sum().backward()
        with pytest.raises(ExchangeError) as caught:
            model(inputs).sum().backward()
        text = str(caught.value)
        with pytest.raises(GossipError, match="cannot train or average after"):
            model(inputs)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return text


@pytest.mark.parametrize(
    ("topology", "num_inputs", "first", "third"),
    [
        ("directed_ring", 30, "the message from rank 1", "rank 1 to receive ours"),
        ("ring", 30, "the message from rank 1", "the message from rank 1"),
        ("ring", 300, "the message from rank 1", "the message from rank 1"),  # large enough to be read in memory
    ],
)
def test_wait_for_a_rank_that_made_fewer_steps_is_named(topology: str, num_inputs: int, first: str, third: str) -> None:
    by_rank = run_ranks(stop_early, topology, num_inputs, world_size=3)
    for rank, awaited in ((0, first), (2, third)):
        assert (
            f"rank {rank}: step 1, bucket 0: timed out after 2 s waiting for {awaited}: rank 1 is absent"
            in by_rank[rank]
        )


def absent_at_average() -> str:
    model = GossipDataParallel(nn.Linear(3, 1), SGD, "ring", timeout=timedelta(seconds=2))
    text = "absent"
    if model.rank:
        with pytest.raises(ExchangeError) as caught:
            model.global_avg()
        text = str(caught.value)
        with pytest.raises(GossipError, match="cannot train or average after"):
            model.global_avg()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return text


def test_wait_for_an_absent_rank_at_the_global_average_is_named() -> None:
    _, second, third = run_ranks(absent_at_average, world_size=3)
    assert "rank 1: comparing buffers before averaging: not all of the 3 ranks took part within 2 s" in second
    assert "rank 2: comparing buffers before averaging" in third
