"""Models that differ among ranks, and other data parallelism around a model or inside it: refused with the reason."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, on_ranks, run_ranks
from small_runs import SGD, batch, make_module
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import topologies
from gossip import GossipDataParallel, GossipError, ManifestError
from topologies import Round, Topology


def three_phases(odd: bool) -> Topology:
    """A composition with a function that has no end to compare; on the odd rank it gives another round 7."""

    def pair(t: int) -> Round:
        return Round.from_groups(3, [(0, 1) if odd and t == 7 else (1, 2)])

    warm_up = topologies.build("complete", 3).then(Topology.from_function(pair, name="own"), after=50)
    return warm_up.then(topologies.build("ring", 3).every(2), after=100)


ODD: dict[str, dict[str, Any]] = {
    "topology": {"topology": "complete"},
    "compression": {"compression": "bf16"},
    "optimizer": {"optimizer": functools.partial(torch.optim.AdamW, lr=0.1)},
    "refused": {"topology": "hypercube"},
}


def odd_one_out(what: str) -> str:
    """What every rank is told when rank 2 differs."""
    is_odd = dist.get_rank() == 2
    width = 5 if is_odd and what == "shape" else 3
    module = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    if is_odd and what == "buffer":
        module.register_buffer("mean", torch.zeros(2))
    options: dict[str, Any] = {"optimizer": SGD, "topology": three_phases(is_odd) if what == "phases" else "ring"}
    options |= ODD.get(what, {}) if is_odd else {}
    return error_of((ManifestError, ValueError), GossipDataParallel, module, **options)


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("shape", ["parameter 1 is '0.weight' float32 [3, 4]", "on rank 0, but '0.weight' float32 [5, 4]"]),
        ("buffer", ["buffer 1 is nothing on rank 0, but 'mean' float32 [2]"]),
        ("topology", ["topology is", "ring", "on rank 0, but", "complete"]),
        ("phases", ["topology is from round 0, every 1: {", "from round 50, every 1: Topology('own'", "[[0, 1]]"]),
        ("compression", ["compression is none on rank 0, but bf16 on rank 2"]),
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


CPU = torch.device("cpu")


def wrap(module: nn.Module) -> GossipDataParallel:
    return GossipDataParallel(module, SGD, "ring")


def shard(module: nn.Module) -> nn.Module:
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


def shard_what_is_inside(module: GossipDataParallel) -> nn.Module:
    shard(module.module)
    return module


AROUND: dict[str, tuple[Callable[[GossipDataParallel], nn.Module], str]] = {
    "DDP": (DistributedDataParallel, "a DistributedDataParallel"),
    "FSDP": (lambda model: FullyShardedDataParallel(model, device_id=CPU), "FullyShardedDataParallel"),
    "fully_shard of the module": (shard_what_is_inside, "fully_shard"),
}


@pytest.mark.parametrize("way", AROUND)
@on_ranks(2, anew=True)
def test_model_inside_another_wrapper_is_refused_at_its_first_forward(way: str) -> None:
    model = wrap(make_module())
    before = [parameter.detach().clone() for parameter in make_module().parameters()]
    around, name = AROUND[way]
    text = error_of(GossipError, around(model), batch(0, 0))
    assert name in text
    assert "gossip.integrations.accelerate.prepare" in text
    assert "gossip.integrations.transformers.GossipTrainer" in text
    if "shard" in text.lower():  # which leaves nothing to go on with
        model.__exit__(GossipError)
        return
    if way == "DDP":  # nothing has been broken
        model(batch(0, 0)).sum().backward()
        assert model.step == 1
        assert not torch.equal(model.module[2].weight, before[2])
    model.close()


def test_model_replicated_by_data_parallel_is_refused() -> None:
    with wrap(make_module()) as model, pytest.raises(GossipError, match=r"torch\.nn\.DataParallel.*start one process"):
        model._replicate_for_data_parallel()  # as it does with several devices
