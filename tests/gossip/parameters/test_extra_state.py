"""What modules keep by ``get_extra_state``, in checkpoints and averages of processes, shards and virtual workers."""

import functools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointing import log_of
from ranks import on_ranks
from sharded_models import make_sharded
from small_runs import SGD
from torch import nn

import gossip
from gossip import GossipDataParallel, VirtualWorkers


class Counting(nn.Linear):
    """Counts its calls and keeps a history, as layers with scales of their own do; ``start`` differs between ranks."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(2, 2)
        self.seen = start
        self.history = torch.zeros(3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.history[self.seen % 3] = self.seen
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return OrderedDict(seen=self.seen, history=self.history, names=("a", [None, torch.float64]))

    def set_extra_state(self, state: Any) -> None:
        assert state["names"] == ("a", [None, torch.float64])
        self.seen, self.history = state["seen"], state["history"]


class Odd(nn.Linear):
    """Its extra state is an object."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.held: Any = functools.partial(max, dist.get_rank() if dist.is_initialized() else 0)

    def get_extra_state(self) -> Any:
        return self.held

    def set_extra_state(self, state: Any) -> None:
        self.held = state


def make_model(start: int = 100, shard: str | None = None) -> GossipDataParallel:
    """Rank r begins to count at ``start + r``."""
    first = start + (dist.get_rank() if dist.is_initialized() else 0)
    module, options = nn.Sequential(Counting(first), nn.Tanh(), Counting(10 * first)), {}
    if shard is not None:
        module, options = make_sharded(module, (2, 2), shard)
    return GossipDataParallel(module, SGD, "ring", **options)


def states(module: Any) -> list[tuple[int, list[float]]]:
    return [(module[place].seen, module[place].history.tolist()) for place in (0, 2)]


def train(model: Any, num_steps: int, rows: int = 1) -> None:
    for _ in range(num_steps):
        model(torch.ones(rows, 2)).sum().backward()


@pytest.mark.parametrize(("shard", "world_size"), [(None, 2), ("fsdp", 4), ("none", 4)])
@on_ranks()
def test_it_is_each_ranks_own_in_a_checkpoint_and_rank_0s_in_averages(
    tmp_path: Path, shard: str | None, world_size: int
) -> None:
    model = make_model(shard=shard)
    train(model, 2)
    mine = states(model.module)
    gossip.save(model, tmp_path)
    assert mine[0][0] == 102 + dist.get_rank()
    train(model, 1)
    gossip.load(model, tmp_path)
    assert states(model.module) == mine, "in place"
    model = make_model(start=0, shard=shard)
    with log_of() as lines:
        gossip.load(model, tmp_path)
    assert lines == []
    assert states(model.module) == mine, "every rank's own"
    gossip.export(model, tmp_path / "exported.safetensors")

    model = make_model(shard=shard)
    train(model, 2)
    mine = states(model.module)
    everyone = [torch.zeros(8, dtype=torch.float64) for _ in range(world_size)]
    dist.all_gather(everyone, torch.tensor([mine[0][0], *mine[0][1], mine[1][0], *mine[1][1]]).double())
    first = everyone[0].tolist()
    firsts = [(int(first[0]), first[1:4]), (int(first[4]), first[5:])]
    with model.averaged():
        assert states(model.module) == firsts, "the average is one model: rank 0's"
        model(torch.ones(1, 2))
        assert states(model.module) != firsts
    assert states(model.module) == mine, "put back"
    train(model, 1)
    model.global_avg()
    assert model.module[0].seen == 103, "rank 0's, of which there is one now"


def test_a_checkpoint_without_it_loads_with_a_warning(tmp_path: Path) -> None:
    def plain() -> GossipDataParallel:
        return GossipDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), SGD, "ring")

    gossip.save(plain(), tmp_path / "plain")
    model = make_model()
    train(model, 2)
    gossip.save(model, tmp_path / "counting")
    for there, loaded, reason in (
        ("plain", model, "'0': there is none in the checkpoint; the extra state of module '2': there is none"),
        ("counting", plain(), "'0': the module here has none"),
    ):
        with log_of() as lines:
            gossip.load(loaded, tmp_path / there)
        assert f"but not: the extra state of module {reason}" in lines[0]
    assert model.module[0].seen == 102


# ---------------------------------------------------------------------- what is not plain data


def odd_model() -> GossipDataParallel:
    return GossipDataParallel(nn.Sequential(Odd()), SGD)


def test_an_object_is_refused_by_its_modules_name_where_it_would_be_kept(tmp_path: Path) -> None:
    for model in (odd_model(), VirtualWorkers(nn.Sequential(Odd()), 2, SGD, devices=["cpu"])):
        with pytest.raises(TypeError, match=r"^the extra state of module '0' is a functools\.partial, which a check"):
            gossip.save(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@on_ranks(2)
def test_an_object_stays_where_it_is_in_averages() -> None:
    model = odd_model()
    mine = model.module[0].held
    with log_of() as lines, model.averaged():
        assert model.module[0].held is mine
        model.module[0].held = None
    assert model.module[0].held.args == mine.args
    assert (not lines) == bool(model.rank)
    assert all("averaged: the extra state of module '0' is a functools.partial" in line for line in lines)
    model.global_avg()
    assert model.module[0].held.args == mine.args


# ---------------------------------------------------------------------- virtual workers


class Branching(Counting):
    """Its control flow depends on the data: replicas run one after the other, each by a copy of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.detach().sum()) > 0 else super().forward(x) + super().forward(x)


def make_workers(kind: type[Counting], num: int = 3) -> VirtualWorkers:
    return VirtualWorkers(kind(100), num, SGD, "ring", devices=["cpu"])


def seen(workers: VirtualWorkers) -> list[int]:
    return [workers.replica(rank).seen for rank in range(workers.world_size)]


UNEVEN = torch.cat([torch.ones(1, 2), -torch.ones(1, 2), torch.ones(1, 2)])
"""The second of three replicas counts twice if it can be told from the others."""


@pytest.mark.parametrize(("kind", "counted"), [(Counting, [102] * 3), (Branching, [102, 104, 102])])
def test_virtual_workers_keep_it_for_each_replica(tmp_path: Path, kind: type[Counting], counted: list[int]) -> None:
    workers = make_workers(kind)
    for _ in range(2):
        workers(UNEVEN).sum().backward()
    assert seen(workers) == counted
    with workers.averaged() as module:
        assert module.seen == counted[0]
        module(torch.ones(1, 2))
    assert seen(workers) == counted
    gossip.save(workers, tmp_path)
    loaded = make_workers(kind)
    for again in range(2):  # before the first call, and after it
        gossip.load(loaded, tmp_path)
        assert seen(loaded) == counted
        gossip.save(loaded, tmp_path / "again")
        content = [torch.load(tmp_path / "again" / "step_0000000002" / f"rank{rank}.pt") for rank in range(3)]
        assert [state["extra"]["_extra_state"]["seen"] for state in content] == counted
        for model in (loaded, workers) if not again else ():
            model(UNEVEN).sum().backward()
        assert seen(loaded) == seen(workers) or again
    gossip.export(loaded, tmp_path / "exported.safetensors")
    loaded.global_avg()
    assert seen(loaded) == [counted[0]] * 3
    other = make_workers(kind, num=4)
    gossip.load(other, tmp_path)
    assert seen(other) == [counted[0]] * 4
    histories = [other.replica(rank).history for rank in range(4)]
    assert len({history.data_ptr() for history in histories}) == 4
