"""model.memory(): what a rank holds, by purpose, now and in training."""

import functools
from typing import Any

import algorithm_table
import pytest
import torch
import torch.distributed as dist
from compressions import COMPRESSIONS
from ranks import on_ranks
from tiers import rest_is_slow
from torch import nn
from torch.distributed.fsdp import fully_shard

from gossip import Codec, Compression, DistributedTransport, GossipDataParallel, make_shard_mesh
from gossip.measuring.step_stats import READ_BY_OTHERS, memory_use

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
OTHER_MACHINES = functools.partial(DistributedTransport, shares_memory=False)
MESSAGES = "messages as sent, and what arrived"


class Reading(Compression):
    """Its codec looks at values before it is known what it keeps."""

    def codec(self, bucket: Any, rank: int) -> Codec:
        return COMPRESSIONS["none"].make(0).codec(bucket, rank + bool(bucket.start.sum() == 0))

    def describe(self) -> str:
        return "reading"


def algorithm(label: str) -> dict[str, Any]:
    row = algorithm_table.ROWS[label]
    sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=row.momentum or 0.0)
    return {
        "algorithm": algorithm_table.make_algorithm(label),
        "topology": algorithm_table.make_topology(row.topologies[0], 4),
        "optimizer": ADAMW if row.momentum is None else sgd,
        "on_peer_loss": "raise" if row.is_in_step else "continue",
    }


MODES: dict[str, dict[str, Any]] = {
    "step_in_backward=False": {"step_in_backward": False},
    "shard=optimizer": {"shard": "optimizer"},
    "unknown": {"optimizer": functools.partial(torch.optim.Adafactor, lr=1e-3), "compression": Reading()},
    "clipping": {"max_difference": "clip", "compression": "int8", "clip_grad_norm": 1.0},
    "continue": {"on_peer_loss": "continue"},
    "continue, int8": {"on_peer_loss": "continue", "compression": "int8"},
    "debug": {"transport": "debug"},
    "other machines": {"transport": OTHER_MACHINES},
    "other machines, all-reduce": {"transport": OTHER_MACHINES, "topology": "complete"},
    "other machines, int4": {"transport": OTHER_MACHINES, "compression": "int4"},
    "shard=optimizer, step_in_backward=False": {"shard": "optimizer", "step_in_backward": False},
    "shard=none, int8": {"shard": "none", "compression": "int8"},
    "fully_shard, int4": {"shard": None, "compression": "int4"},
    "mixed only": {"optimizer": None},
    "fused": {"optimizer": functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)},
}
ROWS = {
    **{name: functools.partial(dict, row) for name, row in MODES.items()},
    **{name: functools.partial(dict, compression=row.make(0)) for name, row in COMPRESSIONS.items()},
    **{label: functools.partial(algorithm, label) for label in algorithm_table.ROWS},
}
QUICK = ["none", "int8", "gradient_tracking", "continue", *list(MODES)[:3]]
PER_PARAMETER: dict[str, dict[str, float | None]] = {
    "none": {"state of the optimizer": 8.0, READ_BY_OTHERS: 4.0, MESSAGES: 0.0},
    "bf16": {READ_BY_OTHERS: 2.0, MESSAGES: 0.0},
    "gradient_tracking": {"state of the algorithm": 8.0, READ_BY_OTHERS: 8.0},
    "step_in_backward=False": {"gradients": 4.0},
    "other machines": {READ_BY_OTHERS: 0.0, MESSAGES: 12.0},
    "unknown": {"state of the optimizer": None, READ_BY_OTHERS: None, MESSAGES: None},
}


@pytest.mark.parametrize("names", rest_is_slow([QUICK, *(list(ROWS)[part::4] for part in range(4))]), ids=len)
@on_ranks(4)
def test_what_is_predicted_is_what_training_holds(names: list[str]) -> None:
    for name in names:
        options = {"optimizer": ADAMW, "topology": "ring", **ROWS[name]()}
        module = nn.Linear(400, 400)
        if "shard" in options:
            options["mesh"] = make_shard_mesh(2)
            if options["shard"] is None:
                fully_shard(module, mesh=options["mesh"]["shard"])
        with GossipDataParallel(module, **options) as model:
            if model.algorithm.weighted:
                model.weigh(2)
            before = model.memory()
            for _ in range(6):  # of what is exchanged every three steps too
                model(torch.ones(2, 400)).square().sum().backward()
                if options.get("step_in_backward") is False:
                    model.optimizer.step()
            after = model.memory()
            dist.barrier()  # a rank that has ended does not answer
        for purpose, measured in after.bytes_of.items():
            predicted = before.in_training[purpose]
            assert after.in_training[purpose] in (predicted, measured), (name, purpose)
            if predicted is not None:
                spare = after.num_spare_bytes if purpose == READ_BY_OTHERS else 0
                assert predicted <= measured <= predicted + spare, (name, purpose)
        for purpose, number in PER_PARAMETER.get(name, {}).items():
            num_bytes = before.in_training[purpose]
            assert (None if num_bytes is None else round(num_bytes / before.num_parameters, 1)) == number, (
                name,
                purpose,
            )
            assert ("known after the first steps" if num_bytes is None else f"{num_bytes:,}") in str(before)


@pytest.mark.parametrize(("num_buffers", "num_bytes"), [(1, 0), (3, 40)])
def test_others_can_come_to_read_as_much_again_in_every_further_buffer(num_buffers: int, num_bytes: int) -> None:
    message = torch.zeros(5)
    assert memory_use(5, {READ_BY_OTHERS: ([], [message])}, num_buffers).num_spare_bytes == num_bytes


@pytest.mark.parametrize(("mode", "most"), [({}, 6), ({"step_in_backward": False}, 40)], ids=["in backward", "outside"])
def test_gradients_of_updated_buckets_are_given_back(mode: dict[str, Any], most: int) -> None:
    """Of 20 layers with two tensors each, of which two layers fill a bucket."""
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    held = []
    for layer in module:
        layer.register_full_backward_pre_hook(
            lambda *_: held.append(sum(each.grad is not None for each in module.parameters()))
        )
    with GossipDataParallel(module, ADAMW, bucket_cap_mb=2 * 4 * 72 / 2**20, **mode) as model:
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert most - 4 <= max(held) <= most
