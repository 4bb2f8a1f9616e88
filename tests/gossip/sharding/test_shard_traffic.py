"""What a group sends in a step is what one replica would, and what a rank keeps is its share of one."""

import contextlib
import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from sharded_models import ADAMW, make_sharded
from tiers import rest_is_slow
from torch import nn

from gossip import GossipDataParallel, StepStats, private_torch
from gossip.communication import row_collectives

SIZE = 128
NUM_LAYERS = 8
NUM_BYTES = 4 * NUM_LAYERS * (SIZE + 1) * SIZE
"""Of the parameters of a replica."""
BUCKET_BYTES = 150_000


def make_model(num_groups: int, ranks_per_group: int, **options: Any) -> GossipDataParallel:
    module = nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(NUM_LAYERS)])
    if ranks_per_group > 1:
        layers, shape = map(str, range(NUM_LAYERS)), (num_groups, ranks_per_group)
        options |= make_sharded(module, shape, options.get("shard", "fsdp"), layers)[1]
    cap = BUCKET_BYTES * ranks_per_group  # the size of what the group has of a bucket together
    return GossipDataParallel(module, ADAMW, "ring", bucket_cap_mb=cap / 2**20, **options)


def train(model: GossipDataParallel, num_steps: int) -> StepStats:
    for _ in range(num_steps):
        model(torch.ones(2, SIZE)).square().mean().backward()
    return model.stats()


def count_bytes(num_groups: int, ranks_per_group: int, options: dict[str, Any]) -> int:
    with make_model(num_groups, ranks_per_group, **options) as model:
        return train(model, 3).bytes_sent


@pytest.mark.parametrize(
    ("num_groups", "ranks_per_group", "compression", "divided"),
    rest_is_slow(
        [
            (2, 2, None, "all"),
            (2, 2, "int8", "optimizer"),
            (2, 2, None, "none"),
            (2, 2, "bf16", "all"),
            (2, 2, "int4", "all"),
            (3, 2, None, "optimizer"),
        ],
        3,
    ),
)
def test_a_group_sends_the_bytes_of_one_replica(
    num_groups: int, ranks_per_group: int, compression: str | None, divided: str
) -> None:
    """Each rank its share of them. int8 and int4 add to the values what tells whether a message can be decoded."""
    options: dict[str, Any] = {"compression": compression}
    whole = run_ranks(count_bytes, num_groups, 1, options, world_size=num_groups)
    if divided != "all":
        options["shard"] = divided
    found = run_ranks(count_bytes, num_groups, ranks_per_group, options, world_size=num_groups * ranks_per_group)
    num_peers = min(2, num_groups - 1)
    bits = {None: 32, "bf16": 16, "int8": 8, "int4": 4}[compression]
    values_bytes = num_peers * NUM_BYTES * bits / 32
    for sent in whole:
        assert values_bytes <= sent <= (1.0 if bits >= 16 else 1.15) * values_bytes
    for group in range(num_groups):
        shares = found[group * ranks_per_group : (group + 1) * ranks_per_group]
        assert shares == [pytest.approx(whole[group] / ranks_per_group, rel=0.01)] * ranks_per_group
        if bits >= 16:
            assert sum(shares) == whole[group]


def kept_memory() -> dict[int, torch.UntypedStorage]:
    """Of all tensors that are alive, by its address."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, nn.Parameter):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


def keep(num_groups: int, ranks_per_group: int, options: dict[str, Any]) -> tuple[int, int]:
    """In bytes, besides what there is before, and the optimizer's part of it.

    The second time, when nothing is made that is made only once.
    """
    for _ in range(2):
        before = kept_memory()  # and holds it, so that its addresses are not given to others
        # What ranks of one machine gather through is of a fixed size, which would hide a model as small as this one.
        with mock.patch.object(row_collectives, "_CHUNK_BYTES", 2**10):
            model = make_model(num_groups, ranks_per_group, **options)
        with model:
            train(model, 3)
            model._live().exchanges.arrive()  # what is on its way takes memory for as long as it is
            dist.barrier()
            found = sum(storage.nbytes() for address, storage in kept_memory().items() if address not in before)
            moments = [entry[key] for entry in model.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
            of_optimizer = sum(each.untyped_storage().nbytes() for each in moments)
        del model, moments
    return found, of_optimizer


@pytest.mark.slow
def test_a_rank_keeps_its_share_of_a_replica_between_steps() -> None:
    """Parameters, the optimizer's state and what is in flight; no gradients, and no parameters twice."""
    whole, of_optimizer = run_ranks(keep, 2, 1, {}, world_size=2)[0]
    assert whole >= 3 * NUM_BYTES
    for share, moments in run_ranks(keep, 2, 2, {}, world_size=4):
        assert 0.98 * whole / 2 <= share <= 1.02 * whole / 2
        assert 2 * moments == of_optimizer
    for _, moments in run_ranks(keep, 2, 2, {"shard": "optimizer"}, world_size=4):
        assert 2 * moments == of_optimizer


@on_ranks(4)
def test_groups_of_two_gather_and_reduce_through_memory_while_the_model_is_open() -> None:
    """The way that a user has set for a layer is left alone."""
    module = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    module, options = make_sharded(module, (2, 2), parts=("0", "1"))
    custom = mock.Mock()
    module[1].set_custom_all_gather(custom)
    module[1].set_custom_reduce_scatter(custom)
    before = [(group._all_gather_comm, group._reduce_scatter_comm) for group in private_torch._fsdp_groups(module)]
    model = GossipDataParallel(module, ADAMW, "ring", **options)
    names = {"all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor"}
    with contextlib.ExitStack() as patches:
        for name in names & vars(dist).keys():  # those with "single" are of torch 2.13
            refuse = AssertionError(f"{name} is called on the process group")
            patches.enter_context(mock.patch.object(dist, name, side_effect=refuse))
        module[0](torch.ones(2, SIZE)).sum().backward()
    model.close()
    after = [(group._all_gather_comm, group._reduce_scatter_comm) for group in private_torch._fsdp_groups(module)]
    assert after == before
    custom.assert_not_called()
    assert module[0](torch.ones(2, SIZE)).shape == (2, SIZE)
