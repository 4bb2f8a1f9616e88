"""Compression in real training, over processes."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from compressions import COMPRESSIONS, PER_MECHANISM
from listening import logged
from ranks import run_ranks
from replicas import SGD, TINY_BUCKETS, assert_equal_states, rank_module, snapshot, train
from torch import nn

import gossip
from gossip import Compression, GossipDataParallel, GossipError, launch

WORLD_SIZE = 4
TOPOLOGY = {
    name: "one_peer_hypercube" if "one_peer_hypercube" in row.topologies else "ring"
    for name, row in COMPRESSIONS.items()
}


def make(name: str, transport: str = "distributed") -> GossipDataParallel:
    return GossipDataParallel(
        rank_module(),
        SGD,
        TOPOLOGY[name],
        compression=COMPRESSIONS[name].make(0),
        bucket_cap_mb=TINY_BUCKETS,
        transport=transport,
    )


def resume(name: str, folder: str) -> None:
    straight = make(name)
    train(straight, range(4))
    gossip.save(straight, folder)
    train(straight, range(4, 8))
    resumed = make(name)
    train(resumed, range(2))  # to have something to be replaced
    gossip.load(resumed, folder)
    train(resumed, range(4, 8))
    assert_equal_states(snapshot(resumed), snapshot(straight))
    debugged = make(name, transport="debug")
    train(debugged, range(8))
    assert_equal_states(snapshot(debugged), snapshot(straight))
    with straight.averaged():
        pass
    straight.global_avg()
    distance, _ = straight.consensus_distance()
    assert distance < 1e-5
    for model in (straight, resumed, debugged):
        model.close()


@pytest.mark.parametrize("name", PER_MECHANISM)
def test_training_resumes_bit_for_bit_and_is_the_same_under_debug(name: str, tmp_path: Path) -> None:
    run_ranks(resume, name, str(tmp_path), world_size=WORLD_SIZE)


def spoil(model: GossipDataParallel) -> tuple[int, str]:
    train(model, range(3))
    text = ""
    num_refused = 0
    if model.rank == 0:
        with torch.no_grad():
            model.module.first.weight[0, 0] = torch.nan
    try:
        for step in range(3, 5):
            train(model, range(step, step + 1))
            num_refused += model.stats().num_refused
    except GossipError as error:
        text = str(error)
    return num_refused, text


def spoil_with_each() -> dict[str, tuple[int, str]]:
    models = {name: make(name) for name in PER_MECHANISM}
    found = {name: spoil(model) for name, model in models.items()}
    with ThreadPoolExecutor(len(models)) as pool:  # the end waits a second for what the rank that stopped does not send
        for model in models.values():
            pool.submit(model._finalizer)
    return found


@pytest.fixture(scope="module")
def spoilt() -> list[dict[str, tuple[int, str]]]:
    """On each rank, by compression, how often it refused a message, and what it was told."""
    return run_ranks(spoil_with_each, world_size=WORLD_SIZE)


@pytest.mark.xdist_group("spoilt")
@pytest.mark.parametrize("name", PER_MECHANISM)
def test_a_rank_whose_values_are_spoilt_is_refused_by_its_peers_and_stops(
    spoilt: list[dict[str, tuple[int, str]]], name: str
) -> None:
    first, *others = (found[name] for found in spoilt)
    assert "what this rank sent in round 3 is not finite" in first[1]
    assert any(num_refused for num_refused, _ in others)


SHARES = {None: 1, "bf16": 0.5, "int8": 0.27, "int4": 0.14}


def bytes_and_lines() -> list[tuple[int, list[str]]]:
    found = []
    for compression in SHARES:
        with logged("INFO") as lines:
            sgd = functools.partial(torch.optim.SGD, lr=1e-3)
            model = GossipDataParallel(nn.Linear(1000, 100), sgd, "one_peer_hypercube", compression=compression)
            for _ in range(4):
                model(torch.randn(8, 1000)).square().mean().backward()
            found.append((model.stats().bytes_sent, lines))
            model.close()
    return found


def test_bytes_are_counted_as_they_are_sent() -> None:
    for found in run_ranks(bytes_and_lines, world_size=2):
        for (compression, share), (sent, lines) in zip(SHARES.items(), found, strict=True):
            assert 0.9 * share * 400_400 <= sent <= share * 400_400 * 1.01
            if lines:
                assert f"compression {compression or 'none'}" in lines[0]


@pytest.mark.parametrize(
    ("compression", "error", "text"),
    [
        ("int7", ValueError, r"unknown compression 'int7'\. Did you mean 'int8'\? Available: bf16, choco"),
        (torch.bfloat16, TypeError, "compression must be a name or a gossip.Compression, got torch.bfloat16"),
    ],
)
def test_unknown_compressions_are_refused(compression: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        GossipDataParallel(nn.Linear(2, 2), SGD, compression=compression)


def construct_with(by_rank: list[str | Compression | None]) -> None:
    GossipDataParallel(nn.Linear(2, 2), SGD, compression=by_rank[torch.distributed.get_rank()])


def test_ranks_with_different_compressions_are_told_apart() -> None:
    with pytest.raises(gossip.LaunchError, match=r"compression is bf16 on rank 0, but int8\(.*\) on rank 1"):
        launch(construct_with, ["bf16", "int8"], world_size=2)
