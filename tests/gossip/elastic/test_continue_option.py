"""Who may go on without lost ranks, or join as the docs say, and that nothing of it is there without the option."""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import unsupervised
from elastic_ranks import flat, make_model, make_steps, steps_until, targets
from examples import code, defined
from fault_places import injected
from free_ports import free_port
from ranks import error_of, on_ranks, run_ranks
from small_runs import SGD
from torch import nn

import gossip
from gossip import GossipDataParallel, GossipError, launch
from gossip.lab.faults.injection import Fault


def make(**options: Any) -> GossipDataParallel:
    return GossipDataParallel(nn.Linear(2, 1), SGD, "ring", **options)


CONTINUE: dict[str, Any] = {"on_peer_loss": "continue"}
LATE = {**CONTINUE, "soft_deadline": 0.1}
ASYNCHRONOUS = {**CONTINUE, "algorithm": "asynchronous"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"on_peer_loss": "ignore"}, 'on_peer_loss must be "raise" or "continue", got \'ignore\''),
    ({"min_ranks": 2}, 'min_ranks=2 is for on_peer_loss="continue"'),
    (CONTINUE | {"transport": "debug"}, "transport is 'debug'"),
    (CONTINUE | {"fallback_topology": "rign"}, r"fallback_topology must be one of .*, got 'rign'"),
    ({"partition_timeout": 5}, 'partition_timeout=5 is for on_peer_loss="continue"'),
    (CONTINUE | {"partition_timeout": timedelta(0)}, "partition_timeout must be a positive number of seconds, or tim"),
    ({"soft_deadline": 0.1}, 'soft_deadline=0.1 is for on_peer_loss="continue"; with "raise" all ranks wait'),
    (LATE | {"soft_deadline": 0.0}, "soft_deadline must be a positive number of seconds, or timedelta, or .*, got 0.0"),
    (LATE | {"compression": "int8"}, "soft_deadline: messages of compression int8.* can be decoded only in their own"),
    (LATE | {"algorithm": "gradient_tracking"}, "soft_deadline: algorithm .* needs all messages of a step at once, "),
    ({"algorithm": "asynchronous"}, 'connections that survive the loss of a rank; pass on_peer_loss="continue"'),
    (ASYNCHRONOUS | {"compression": "int8"}, "sends uncompressed values and differences, got compression int8"),
    (ASYNCHRONOUS | LATE, "waits max_staleness steps for a peer, got a soft_deadline as well"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_what_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, GossipError), match=text):
        make(**options)


def test_a_world_of_one_has_nobody_to_lose() -> None:
    with make(on_peer_loss="continue") as model:
        model(torch.ones(1, 2)).sum().backward()
        assert (model.rank, model.world_size, model.members) == (0, 1, (0,))


def test_min_ranks_is_a_number_of_the_ranks() -> None:
    text = "min_ranks must be from 1 to the number of ranks, 3, got 4"
    options = {"topology": "ring", "min_ranks": 4}
    assert launch(error_of, ValueError, make_model, 4, options, world_size=3) == [text] * 3


def error_with(make_group: Callable[[int], None]) -> str:
    """In a process group of its own."""
    rank = dist.get_rank()
    dist.barrier()  # else a rank that leaves could take the other's connection with it
    dist.destroy_process_group()
    make_group(rank)
    return error_of(ValueError, make_model, 4, {"topology": "ring"})


def group_with_the_store_in_a_rank(port: int, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def test_a_store_that_dies_with_a_rank_is_refused() -> None:
    for text in run_ranks(error_with, functools.partial(group_with_the_store_in_a_rank, free_port()), world_size=2):
        assert "but it is served by the process of rank 0; start the ranks with gossip.launch or torchrun" in text


@on_ranks(2)
def test_ranks_that_listen_for_their_own_machine_alone_must_be_on_one(tmp_path: Path) -> None:
    def make_group(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

    from gossip.elastic import elastic_world  # another test shows that it is not loaded by default

    with mock.patch.object(elastic_world, "own_network", return_value=["a machine", dist.get_rank()]):
        text = error_with(make_group)
    assert "is on a different machine than rank" in text
    assert "because its key-value store, FileStore, has no host" in text


def gammas_around_a_death() -> list[float]:
    rank = dist.get_rank()
    with make_model(16, {"topology": "ring"}) as model:
        found = []
        for step in range(10):
            model.algorithm.gamma = 1.0 - step / 16 if step < 4 else model.algorithm.gamma  # type: ignore[attr-defined]
            if rank == 1 and step == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            model(targets(rank, 16)).backward()
            found.append(model.algorithm.gamma)  # type: ignore[attr-defined]
        return found


def test_a_mixing_factor_that_was_set_stays() -> None:
    expected = [1.0, 15 / 16, 14 / 16] + [13 / 16] * 7
    assert launch(gammas_around_a_death, world_size=3, on_peer_loss="continue") == [expected, None, expected]


def save_with_a_death(folder: str) -> tuple[torch.Tensor, list[str]]:
    rank = dist.get_rank()
    deaths = [Fault(place="together", step=4)] if rank == 2 else []
    model = make_model(16, {"topology": "ring"})
    make_steps(model, 4)
    with injected(deaths):
        gossip.save(model, folder)
    before = flat(model.module)
    make_steps(model, 3)
    model.close()
    return before, sorted(path.name for path in Path(folder).iterdir())


def save_on_a_full_disk(folder: Path) -> tuple[list[str], tuple[int, ...]]:
    rank = dist.get_rank()
    with injected([Fault("full disk", "saving")] if rank == 1 else []), make_model(16, {"topology": "ring"}) as model:
        make_steps(model, 3)
        with pytest.raises(gossip.CheckpointError, match="No space left on device"):
            gossip.save(model, folder)
        model(targets(rank, 16)).backward()
        gossip.save(model, folder)
        return [path.name for path in folder.glob("step*")], model.members


@pytest.mark.slow
def test_a_full_disk_ends_nobody_s_training(tmp_path: Path) -> None:
    results = launch(save_on_a_full_disk, tmp_path, world_size=3, on_peer_loss="continue")
    assert results == [(["step_0000000004"], (0, 1, 2))] * 3


def load_what_is_left(folder: str) -> tuple[int, int, torch.Tensor]:
    with make_model(16, {"topology": "ring"}) as model:
        checkpoint = gossip.load(model, folder)
        return checkpoint.world_size, checkpoint.step, flat(model.module)


@pytest.mark.slow
def test_a_rank_that_ends_while_all_save_is_left_out(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    results = unsupervised.results_of(save_with_a_death, folder, world_size=4)
    assert [rank for rank, result in enumerate(results) if result is None] == [2]
    assert all(
        result[1] == [".lock", "step_0000000004"] or result[1] == ["step_0000000004"] for result in results if result
    )
    loaded = launch(load_what_is_left, folder, world_size=3)
    for rank, result in zip(range(3), (results[0], results[1], results[3]), strict=True):
        assert loaded[rank][:2] == (3, 4)
        assert torch.equal(loaded[rank][2], result[0])


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
