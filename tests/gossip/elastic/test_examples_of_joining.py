"""How a process joins, and where its loop and its schedule begin, as docs/when_ranks_die.md has it."""

import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist
import unsupervised
from elastic_ranks import steps_until
from examples import code, defined

import gossip

WORLD_SIZE = 2
NUM_MORE = 6


def train(_: int) -> tuple[int, dict[int, float]]:
    """The first step of this rank, and the learning rate at each step; the training ends once one more has come."""
    model = gossip.GossipDataParallel(
        torch.nn.Linear(8, 1), functools.partial(torch.optim.SGD, lr=0.1), "ring", on_peer_loss="continue", min_ranks=1
    )
    found = defined("docs/when_ranks_die.md", 2, torch=torch, model=model, num_steps=model.step + 1)
    assert found["step"] == model.step
    rates = {}
    for _ in steps_until(model, lambda: model.world_size > WORLD_SIZE, NUM_MORE):
        rates[model.step] = model.optimizer.param_groups[0]["lr"]
        model(torch.randn(16, 8)).square().mean().backward()
        found["scheduler"].step()
    model.global_avg()
    model.close()
    return min(rates), rates


def join(address: tuple[str, int]) -> tuple[int, dict[int, float]]:
    """Runs in a process of its own, which stays one that has joined."""
    told: list[tuple[int, dict[int, float]]] = []
    joining = code("docs/when_ranks_die.md", 1).replace("10.0.0.1:29500", "{}:{}".format(*address))
    try:
        exec(joining, {"gossip": gossip, "train": lambda num_steps: told.append(train(num_steps))})
    finally:
        dist.destroy_process_group()
    return told[0]


@pytest.mark.slow
def test_a_process_joins_with_the_step_and_the_learning_rate_of_the_others() -> None:
    with (
        unsupervised.started(train, 0, world_size=WORLD_SIZE) as ranks,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes,
    ):
        first, rates = processes.submit(join, ranks.address).result()
        others = ranks.results()
    assert (first > 0, len(others)) == (True, WORLD_SIZE)
    assert rates == pytest.approx({step: 0.1 * 0.999**step for step in range(first, first + NUM_MORE)})
    for began, theirs in others:
        assert began == 0
        assert rates.items() <= theirs.items()
