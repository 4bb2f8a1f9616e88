"""Real models sharded over groups: against plain loops with ``fully_shard``, and every mode that a loop may use."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from sharded_models import ADAMW, groups_and_ranks, make_mesh, values_of
from tiers import rest_is_slow
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gossip import GossipDataParallel, GossipError, ManifestError, launch, make_shard_mesh
from gossip.communication.row_collectives import RowCollectives


class Net(nn.Module):
    """Layers of sizes that no group divides, one of them frozen, one used twice, and a checkpointed one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.body = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.last = nn.Linear(7, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.frozen(x)).tanh()
        for layer in self.body:
            x = checkpoint(layer, x, use_reentrant=False).tanh()
        return self.last(self.body[0](x))


def shard(module: Net, mesh: DeviceMesh, **options: Any) -> Net:
    """Layer by layer, but for the one that is used twice, which lies in the root's group."""
    for part in (module.first, module.body[1], module.last, module):
        fully_shard(part, mesh=mesh["shard"], **options)
    return module


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), x.float().flip(1))


def train_groups(is_sharded: bool, mode: str, divided: str) -> torch.Tensor:
    """Two groups of two ranks, or two ranks that see what a group sees."""
    ranks_per_group = 2 if is_sharded else 1
    mesh = make_mesh(2, 2) if is_sharded else None
    rank, group = dist.get_rank(), dist.get_rank() // ranks_per_group
    module = Net().double()
    if mesh is not None and divided == "all":
        shard(module, mesh)
    model = GossipDataParallel(
        module, ADAMW, "ring", mesh=mesh, shard=divided if is_sharded and divided != "all" else None
    )
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(6, 2, 2, 4, 6, generator=generator, dtype=torch.float64)  # step, micro-batch, group, sample
    with model:
        for step in range(6):
            mine = data[step, :, group]
            if is_sharded:
                mine = mine[:, rank % 2 :: 2]
            if mode == "accumulated":
                with model.no_sync():
                    (loss_of(model, mine[0]) / 2).backward()
                (loss_of(model, mine[1]) / 2).backward()
            elif mode == "idle" and step == 3:
                model.idle_step()
            else:
                loss_of(model, mine[0]).backward()
        return values_of(module)


@pytest.mark.parametrize(
    ("mode", "divided"), rest_is_slow([("accumulated", "optimizer"), ("accumulated", "none"), ("idle", "all")])
)
def test_groups_of_two_train_as_ranks_that_see_what_a_group_sees(mode: str, divided: str) -> None:
    for values, wanted in groups_and_ranks(train_groups, mode, divided):
        torch.testing.assert_close(values, wanted, rtol=0, atol=1e-12)


def of_three_layers(seed: int) -> tuple[nn.ModuleDict, torch.Tensor]:
    """A module of that seed, and data of every step and rank."""
    torch.manual_seed(seed)
    module = nn.ModuleDict({name: nn.Linear(3, 3).double() for name in ("both", "one", "unused")})
    for part in module.values():
        nn.init.normal_(part.weight)
    return module, torch.randn(4, 4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def train_apart(divided: str) -> tuple[torch.Tensor, int]:
    """Ranks of a group begin with other values and use other layers, and one is idle in a step."""
    module, data = of_three_layers(dist.get_rank())
    mesh = make_mesh(2, 2)
    model = GossipDataParallel(module, ADAMW, "ring", mesh=mesh, shard=divided, bucket_cap_mb=1e-5)
    place = dist.get_rank() % 2
    for step in range(4):
        if step == 2 and place == 1:
            model.idle_step()
            continue
        x = data[step, dist.get_rank()]
        y = module["both"](x)
        if place == 0:
            y = module["one"](y)
        y.square().mean().backward()
    return values_of(module), len(model.optimizer.state)


def train_together() -> torch.Tensor:
    """The same with a rank for each group, whose loss is the mean of its ranks' losses."""
    module, data = of_three_layers(0)
    model = GossipDataParallel(module, ADAMW, "ring")
    for step in range(4):
        first, second = data[step, 2 * dist.get_rank() : 2 * dist.get_rank() + 2]
        loss = module["one"](module["both"](first)).square().mean() / 2
        if step != 2:
            loss = loss + module["both"](second).square().mean() / 2
        loss.backward()
    values = values_of(module)
    model.close()
    return values


@pytest.mark.parametrize("divided", ["optimizer", "none"])
def test_ranks_of_a_group_may_use_other_parameters_and_be_idle(divided: str) -> None:
    found = run_ranks(train_apart, divided, world_size=4)
    wanted = run_ranks(train_together, world_size=2)
    for rank, (values, num_updated) in enumerate(found):
        torch.testing.assert_close(values, wanted[rank // 2], rtol=0, atol=1e-12)
        assert num_updated == 4, "what no rank of the group uses is not updated"


@pytest.mark.parametrize("divided", ["all", "optimizer", "none"])
@on_ranks(4)
def test_edits_averages_and_the_end_leave_the_module_whole(divided: str) -> None:
    """What is written between steps counts, and what was gathered before is not read again."""
    mesh = make_mesh(2, 2)
    module = Net().double()
    if divided == "all":
        shard(module, mesh, reshard_after_forward=False)
    model = GossipDataParallel(module, ADAMW, "ring", mesh=mesh, shard=None if divided == "all" else divided)
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss_of(model, x).backward()
    with torch.no_grad():
        own = model(x)
    with model.averaged(), torch.no_grad():
        average, of_all = values_of(module), model(x)
    assert not torch.equal(own, of_all)
    with torch.no_grad():
        assert torch.equal(model(x), own)
    model.global_avg()
    torch.testing.assert_close(values_of(module), average, rtol=0, atol=1e-15)
    with torch.no_grad():
        torch.testing.assert_close(model(x), of_all, rtol=0, atol=1e-15)
    model.global_avg()  # what that forward pass has gathered is dropped, and the parameters are the shards again
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    loss_of(model, x).backward()
    assert float(values_of(module).abs().max()) <= 0.011, "one step of AdamW from zero"
    model.close()
    before = values_of(module)
    loss_of(module, x).backward()  # trains plainly from here on
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert not torch.equal(values_of(module), before)


@on_ranks(2)
def test_gradients_are_averaged_beside_the_backward_pass() -> None:
    mesh = make_mesh(1, 2)
    layers = [nn.Linear(4, 4) for _ in range(5)]
    module = nn.Sequential(*layers)
    model = GossipDataParallel(module, ADAMW, "ring", mesh=mesh, shard="optimizer", bucket_cap_mb=1e-5)
    begun, ended, found = [], [], []
    begin = RowCollectives.begin_sum

    def begin_and_count(self: RowCollectives, rows: torch.Tensor, what: str) -> Callable[[], torch.Tensor]:
        begun.append(what)
        wait = begin(self, rows, what)

        def wait_and_count() -> torch.Tensor:
            ended.append(what)
            return wait()

        return wait_and_count

    layers[0].register_full_backward_pre_hook(lambda *_: found.append((len(begun), len(ended))))
    with mock.patch.object(RowCollectives, "begin_sum", begin_and_count):
        model(torch.randn(2, 4)).sum().backward()
    # When the first layer's gradient is made, those of a weight and a bias of each later one: one still runs beside it.
    assert found == [(8, 7)]


@pytest.mark.parametrize(
    ("how", "divided"),
    [("unfrozen", "optimizer"), ("unfrozen", None), ("replaced", "optimizer"), ("added", "optimizer")],
)
@on_ranks(2)
def test_a_module_that_was_changed_after_wrapping_is_refused(how: str, divided: str | None) -> None:
    mesh = make_mesh(2, 1) if divided else make_mesh(1, 2)
    module = Net() if divided else shard(Net(), mesh)
    with GossipDataParallel(module, ADAMW, "ring", mesh=mesh, shard=divided) as model:
        if how == "unfrozen":
            module.frozen.weight.requires_grad_(True)
        elif how == "replaced":
            module.load_state_dict(dict(module.state_dict()), assign=True)
        else:
            module.added = nn.Parameter(torch.ones(2))
        with pytest.raises(GossipError, match=rf"parameter '\w[\w.]*' was {how}.*close\(\) the model and wrap"):
            model(torch.ones(2, 6))
    if how == "unfrozen":  # as the text advises
        with GossipDataParallel(module, ADAMW, "ring", mesh=mesh, shard=divided) as model:
            loss_of(model, torch.ones(2, 6)).backward()
            assert model.step == 1


def in_part(mesh: DeviceMesh) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module[0], mesh=mesh["shard"])
    return module


def whole(mesh: DeviceMesh, **dtypes: torch.dtype) -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(**dtypes))


REFUSED: dict[str, tuple[Callable[[DeviceMesh], nn.Module], dict[str, Any], str]] = {
    "hybrid": (lambda mesh: fully_shard(nn.Linear(4, 4), mesh=mesh), {}, "hybrid sharding"),
    "plain": (lambda _: nn.Linear(4, 4), {}, "the module is not sharded; apply torch.distributed.fsdp.fully_shard"),
    "a scalar": (
        lambda _: nn.ParameterDict({"scale": nn.Parameter(torch.ones(()))}),
        {"shard": "optimizer"},
        "parameter 'scale' is a scalar, which cannot be divided among ranks",
    ),
    "kept whole": (whole, {"shard": "none"}, "fully_shard was applied to it; leave out one of"),
    "sparse": (
        lambda _: nn.Sequential(nn.Embedding(4, 4, sparse=True)),
        {"shard": "optimizer"},
        "module '0' has sparse=True, .*; build it with sparse=False",
    ),
    "whole messages": (
        lambda _: nn.Linear(4, 4),
        {"shard": "none", "algorithm": "sparse_loco", "topology": "complete"},
        "algorithm SparseLoCo.* needs the whole message",
    ),
    "unknown": (whole, {"shard": "parameters"}, 'shard must be "optimizer" or "none", got .parameters.'),
    "without a mesh": (lambda _: nn.Linear(4, 4), {"shard": "optimizer", "mesh": None}, "needs mesh"),
    "asynchronous": (whole, {"algorithm": "asynchronous"}, "asynchronous cannot be combined with mesh"),
    "in part": (in_part, {}, "parameter '1.weight' is not sharded"),
    "rejoins": (
        whole,
        {"on_peer_loss": "continue", "partition_timeout": 9.0},
        "partition_timeout cannot be combined with mesh",
    ),
    "late": (
        lambda _: nn.Linear(4, 4),
        {"on_peer_loss": "continue", "shard": "none", "soft_deadline": 1.0},
        'soft_deadline cannot be combined with shard="none"',
    ),
    "no mesh": (whole, {"mesh": None}, "is sharded .FullyShardedDataParallel, fully_shard."),
    "in DDP": (
        lambda _: nn.Sequential(DistributedDataParallel(nn.Linear(3, 3))),
        {"shard": "none"},
        "is a DistributedDataParallel, which would all-reduce the gradients",
    ),
    "of whole matrices": (
        whole,
        {"optimizer": torch.optim.Adafactor},
        'Adafactor computes its update from whole parameters, .* or shard="optimizer", which deals them whole',
    ),
    "of all parameters": (
        lambda _: nn.Linear(4, 4),
        {"optimizer": torch.optim.LBFGS, "shard": "optimizer", "step_in_backward": False},
        'LBFGS computes its update from all parameters of a replica, .* or shard="none"',
    ),
    "gathered in fp8": (
        lambda mesh: whole(mesh, param_dtype=torch.float8_e4m3fn),
        {},
        "'weight' is sharded with param_dtype torch.float8_e4m3fn; only float64, .* MixedPrecisionPolicy",
    ),
    "another type": (whole, {"mesh": (2, 1)}, "mesh must be a torch.distributed.device_mesh.DeviceMesh, got tuple"),
}


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused() -> None:
    mesh = make_mesh(2, 1)
    for make, options, text in REFUSED.values():
        with pytest.raises((ValueError, TypeError), match=text):
            GossipDataParallel(make(mesh), **{"optimizer": ADAMW, "topology": "ring", "mesh": mesh, **options})


@on_ranks(3)
def test_a_local_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"local_size must be a number of ranks that divides the 3 there are, got 2"):
        make_shard_mesh(2)
    with pytest.raises(ValueError, match=r'device_type must be "cpu", or "cuda" .*, got .gpu.'):
        make_shard_mesh(3, "gpu")
    own = 3 if dist.get_rank() == 1 else 1
    with pytest.raises(ManifestError, match=r"local_size is 1 on rank 0, but 3 on rank 1; call make_shard_mesh alike"):
        make_shard_mesh(own, "cpu")
    assert make_shard_mesh(3, "cpu").mesh.tolist() == [[0, 1, 2]]


def shape_of_mesh() -> tuple[int, ...]:
    return tuple(make_shard_mesh(device_type="cpu").shape)


def test_the_mesh_follows_launch() -> None:
    assert launch(shape_of_mesh, world_size=4, local_size=2) == [(2, 2)] * 4
    assert launch(shape_of_mesh, world_size=2) == [(1, 2)] * 2
    with pytest.raises(ValueError, match=r"local_size must divide world_size 4, got 3; use one of 1, 2, 4"):
        launch(shape_of_mesh, world_size=4, local_size=3)


def test_a_mesh_without_ranks_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"start the function with gossip.launch"):
        make_shard_mesh(2)
