"""The options of ``fully_shard`` and the forms of a loop: dtypes, checkpointing, resharding, forwards in between."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import sharded_models
import torch
import torch.distributed as dist
from sharded_models import ADAMW, assert_trains_as_by_hand, batches, loop_over, make_mesh, make_sharded, values_of
from tiers import rest_is_slow
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from gossip import GossipDataParallel
from gossip.private_torch import fsdp_modules

NUM_STEPS = 3
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Net(nn.Module):
    """Layers of which the first one's inputs need no gradient; sizes that two ranks do not divide."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 6)])
        self.scale = nn.Parameter(torch.ones(6))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "model":
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointing in ("reentrant", "not reentrant"):
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant").tanh()
            else:
                x = layer(x).tanh()
        return x * self.scale


def once(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), x.float().flip(1))


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two forward passes, and one backward pass through both."""
    return once(model, x) + once(model, 2 * x)


def beside_another(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Forward passes that nobody backpropagates, with gradients and without, before the one that counts and after."""
    with torch.no_grad():
        model(3 * x)
    once(model, 2 * x)
    loss = once(model, x)
    with torch.no_grad():
        model(3 * x)
    return loss


def of_inputs_that_need_gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return once(model, x.requires_grad_(True))


class Policy:
    """How a module is sharded, and the loop."""

    def __init__(
        self,
        dtype: torch.dtype = FP32,
        layers: dict[str, Any] | None = None,
        root: dict[str, Any] | None = None,
        checkpointing: str = "",
        loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] = once,
        world_size: int = 2,
        **options: Any,
    ) -> None:
        self.world_size = world_size
        self.dtype, self.checkpointing, self.loss_of = dtype, checkpointing, loss_of
        self.layers = {**options, **(layers or {})}
        self.root = {**options, **(root or {})}

    def make(self, mesh: Any) -> nn.Module:
        module = Net(self.checkpointing).to(self.dtype)
        for layer in module.layers:
            fully_shard(layer, mesh=mesh["shard"], **self.layers)
        return fully_shard(module, mesh=mesh["shard"], **self.root)


def mixed(**dtypes: torch.dtype) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(**dtypes)}


POLICIES: dict[str, Policy] = {
    "bf16, reduced in float32": Policy(**mixed(param_dtype=BF16, reduce_dtype=FP32)),
    "bf16, output in float32": Policy(
        **mixed(param_dtype=BF16, reduce_dtype=FP32), root=mixed(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)
    ),
    "fp16": Policy(**mixed(param_dtype=FP16)),
    "reduced in bf16": Policy(**mixed(reduce_dtype=BF16)),
    "parameters in bf16, reduced in float32": Policy(dtype=BF16, **mixed(reduce_dtype=FP32)),
    "parameters in float64, bf16": Policy(dtype=FP64, **mixed(param_dtype=BF16, reduce_dtype=FP32)),
    "resharded": Policy(reshard_after_forward=True),
    "kept": Policy(reshard_after_forward=False),
    "checkpointed": Policy(checkpointing="not reentrant"),
    "checkpointed reentrantly": Policy(checkpointing="reentrant", loss_of=of_inputs_that_need_gradients),
    "checkpointed as a whole": Policy(checkpointing="model"),
    "two forward passes": Policy(loss_of=twice, reshard_after_forward=False),
    "other forward passes, kept": Policy(loss_of=beside_another, reshard_after_forward=False),
    "gradients of inputs": Policy(loss_of=of_inputs_that_need_gradients),
    "resharded to two ranks of four": Policy(world_size=4, reshard_after_forward=2),
}


def train(by_hand: bool, name: str, options: dict[str, Any]) -> torch.Tensor:
    policy, mesh = POLICIES[name], make_mesh(1, dist.get_world_size())
    module = policy.make(mesh)
    with loop_over(module, mesh, by_hand=by_hand, **options) as (model, end_step):
        for step, x in enumerate(batches(NUM_STEPS, 3, 6)):
            policy.loss_of(model, x.to(policy.dtype)).backward()
            end_step()
            assert by_hand or model.step == step + 1
        return values_of(module)


MODES: dict[str, dict[str, Any]] = {"bucketwise": {"bucket_cap_mb": 1e-4}, "gathered": {"clip_grad_norm": 1e9}}


@pytest.mark.parametrize(("name", "mode"), rest_is_slow(zip(POLICIES, itertools.cycle(MODES), strict=False), 5))
def test_policies_train_as_by_hand_bit_for_bit(name: str, mode: str) -> None:
    assert_trains_as_by_hand(train, name, MODES[mode], world_size=POLICIES[name].world_size)


# ---------------------------------------------------------------------- tied


class Tied(nn.Module):
    """The output layer has the embedding's weights, and a layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 5)
        self.middle = nn.Linear(5, 5)
        self.between = nn.Linear(5, 5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.embedding(tokens)).tanh()
        return self.head(self.middle(self.between(x)).tanh())


def train_tied(by_hand: bool) -> torch.Tensor:
    module, options = make_sharded(Tied(), (1, dist.get_world_size()), parts=("between",))
    with loop_over(module, options["mesh"], by_hand=by_hand) as (model, end_step):
        for step in range(4):
            tokens = (torch.arange(4) + step + dist.get_rank()) % 9
            nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
            end_step()
        assert module.head.weight is module.embedding.weight
        return values_of(module)


def test_tied_weights_and_layers_that_are_used_twice_train_as_by_hand_bit_for_bit() -> None:
    assert_trains_as_by_hand(train_tied, world_size=2)


# ---------------------------------------------------------------------- accumulated

NUM_BATCHES = 3  # per step

WAYS = ("sync", "resharded late", "no_sync", "sync and no_sync in turn")


def make_module(mesh: Any, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 6))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh["shard"], **options)
    return fully_shard(module, mesh=mesh["shard"], **options)


def set_switches(module: Any, way: str, number: int) -> None:
    """Before one of a step's batches."""
    is_last = number == NUM_BATCHES - 1
    if way in ("sync", "resharded late") or (way.endswith("turn") and number != 1):
        module.set_requires_gradient_sync(is_last or (way.endswith("turn") and number != 0))
    if way == "resharded late":
        module.set_reshard_after_backward(is_last)


def pausing(model: nn.Module, way: str, number: int) -> contextlib.AbstractContextManager[None]:
    if not isinstance(model, GossipDataParallel) or number == NUM_BATCHES - 1:
        return contextlib.nullcontext()
    pauses = way == "no_sync" or (way.endswith("turn") and number == 1)
    return model.no_sync() if pauses else contextlib.nullcontext()


def reshard(module: nn.Module) -> None:
    for part in fsdp_modules(module):
        part.reshard()


def accumulate(by_hand: bool, way: str, options: dict[str, Any]) -> torch.Tensor:
    mesh = make_mesh(1, 2)
    module = make_module(mesh, **options)
    data = batches(NUM_STEPS * NUM_BATCHES, 3, 6)
    with loop_over(module, mesh, by_hand=by_hand, bucket_cap_mb=1e-4) as (model, end_step):
        for step in range(NUM_STEPS):
            for number in range(NUM_BATCHES):
                set_switches(module, way, number)
                x = data[step * NUM_BATCHES + number]
                with pausing(model, way, number):
                    (nn.functional.mse_loss(model(x).float(), x.flip(1)) / NUM_BATCHES).backward()
                if not by_hand:
                    assert model.step == step + (number == NUM_BATCHES - 1)
            end_step()
            if by_hand:  # it would go on with what was gathered before
                reshard(module)
        reshard(module)
        return values_of(module)


OPTIONS = {"float32": {}, "kept": {"reshard_after_forward": False}, "bf16": mixed(param_dtype=BF16, reduce_dtype=FP32)}


@pytest.mark.parametrize(("way", "options"), list(zip(WAYS, itertools.cycle(OPTIONS), strict=False)))
def test_accumulated_gradients_make_one_step_as_by_hand_bit_for_bit(way: str, options: str) -> None:
    assert_trains_as_by_hand(accumulate, way, OPTIONS[options], world_size=2)


# ---------------------------------------------------------------------- overflows

OVERFLOWS_AT = 2


def scale(is_sharded: bool, in_backward: bool) -> tuple[torch.Tensor, list[float], list[int]]:
    """Values after the run; by step the scale before it, and whether the step changed the values of this rank."""
    module: Any = nn.Linear(4, 4)
    with torch.no_grad():
        module.weight.fill_(0.5)
        module.bias.fill_(0.25)
    options: dict[str, Any] = {}
    if is_sharded:
        module, options = make_sharded(module, (2, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales, changed = [], []
    model = GossipDataParallel(
        module, ADAMW, "ring", algorithm="adapt_then_combine", scaler=scaler, step_in_backward=in_backward, **options
    )
    with model:
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + model.rank)
            x = torch.randn(4, 4, generator=generator)
            if is_sharded:
                x = x[dist.get_rank() % 2 :: 2]
            weights = torch.ones(4)
            if step == OVERFLOWS_AT and dist.get_rank() == (2 if is_sharded else 1):
                weights[0] = float("inf")  # the gradients of the first rows, which another rank of the group has not
            loss = (model(x).square() * weights).mean()
            scaler.scale(loss).backward()
            scales.append(scaler.get_scale())
            if not in_backward:
                scaler.step(model.optimizer)
                scaler.update()
                model.zero_grad()
            changed.append(model.stats().num_skipped)
        assert model.step == 6
        model.state_dict()  # combines what is in flight
        return values_of(module), scales, changed


@pytest.mark.parametrize("in_backward", [True, False])
def test_an_overflow_on_one_rank_skips_the_update_of_its_group(in_backward: bool) -> None:
    """As with two ranks that see what a group sees: everybody exchanges, and the scale halves one step later."""
    for (values, scales, skipped), wanted in sharded_models.groups_and_ranks(scale, in_backward):
        assert {*scales} == {1024.0, 2048.0}
        torch.testing.assert_close(values, wanted[0], rtol=0, atol=1e-6)
        assert (scales, skipped) == wanted[1:]
