"""Other data parallelism around a model, or inside it: refused with the remedy, never training the same parameters."""

from collections.abc import Callable

import pytest
import torch
from ranks import error_of, on_ranks
from small_runs import SGD, batch, make_module
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gossip import GossipDataParallel, GossipError

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
