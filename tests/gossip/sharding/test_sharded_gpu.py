"""Sharded replicas on GPUs, over NCCL and over gloo, give what the CPU gives, and a step does not hold the host."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from devices import choose_device, needs_a_gpu, needs_nccl
from sharded_models import ADAMW, values_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gossip import GossipDataParallel, LaunchError, launch
from gossip.communication import device_paths

pytestmark = pytest.mark.gpu

NUM_STEPS = 4


class Net(nn.Module):
    """Layers of sizes that no group divides, a frozen one, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(self.frozen(x)).tanh()).tanh()
        return self.last(self.middle(x))


def make_model(
    kind: str, shape: tuple[int, int], policy: dict[str, Any], options: dict[str, Any], optimizer: Any = ADAMW
) -> GossipDataParallel:
    """One bucket for each parameter, so that updates begin while other layers are still reduced."""
    device = choose_device(kind)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("gossip", "shard"))
    dtype = torch.float64 if "mp_policy" not in policy else torch.float32
    module = Net().to(device, dtype)
    for layer in (module.first, module.last):
        fully_shard(layer, mesh=mesh["shard"], **policy)
    fully_shard(module, mesh=mesh["shard"], **policy)
    return GossipDataParallel(module, optimizer, "ring", mesh=mesh, **{"bucket_cap_mb": 1e-5, **options})


MODES: dict[str, dict[str, Any]] = {
    "bucketwise": {},
    "clipped": {"clip_grad_norm": 0.1},
    "optimizer": {"step_in_backward": False},
    "adapt_then_combine": {"algorithm": "adapt_then_combine"},
}
POLICIES: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


HOST_MODES: dict[str, dict[str, Any]] = {
    "continue": {"on_peer_loss": "continue"},
    "int8": {"compression": "int8"},
    "continue int8": {"on_peer_loss": "continue", "compression": "int8"},
}
"""Their messages go through host memory, where gloo carries them."""


def train(kind: str, shape: tuple[int, int], mode: str, policy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and their average; of the steps one accumulates, and one is idle: updates on the other stream."""
    with make_model(kind, shape, POLICIES[policy], (MODES | HOST_MODES)[mode]) as model:
        module = model.module
        parameter = next(module.parameters())
        for step in range(NUM_STEPS):
            generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
            x = torch.randn(4, 6, generator=generator, dtype=torch.float64).to(parameter.device, parameter.dtype)
            if step == 1:
                with model.no_sync():
                    nn.functional.mse_loss(model(x).to(x), x.flip(1)).backward()
            if step == 2:
                model.idle_step()
                continue
            nn.functional.mse_loss(model(x).to(x), x.flip(1)).backward()
            if mode == "optimizer":
                model.clip_grad_norm_(0.1)
                model.optimizer.step()
                model.zero_grad()
        model.state_dict()  # combines what is to be combined before the values are read
        values = values_of(module).cpu()
        with model.averaged():
            average = values_of(module).cpu()
        return values, average


SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2)]
CASES = [*(("nccl", shape) for shape in SHAPES), ("cpu:gloo,cuda:nccl", (2, 2))]


def check_equal(found: list[Any], wanted: list[Any], tolerance: float) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)  # the values and their average


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "shape"), CASES)
@needs_nccl
def test_groups_on_gpus_train_as_groups_on_cpus(backend: str, shape: tuple[int, int], mode: str, policy: str) -> None:
    num_ranks = shape[0] * shape[1]
    wanted = launch(train, "cpu", shape, mode, policy, world_size=num_ranks)
    found = launch(train, "cuda", shape, mode, policy, world_size=num_ranks, backend=backend)
    tolerance = 1e-6 if policy != "bf16" else 3e-2  # AdamW's first steps are signs: a rounded gradient may have another
    check_equal(found, wanted, tolerance)


@pytest.mark.parametrize("mode", HOST_MODES)
@needs_nccl
def test_messages_pass_through_the_host_where_nccl_serves_the_groups(mode: str) -> None:
    wanted = launch(train, "cpu", (2, 2), mode, "resharded", world_size=4)
    found = launch(train, "cuda", (2, 2), mode, "resharded", world_size=4, backend="cpu:gloo,cuda:nccl")
    check_equal(found, wanted, 1e-6 if mode == "continue" else 1e-2)


@needs_a_gpu
def test_fully_shard_over_gloo_is_refused_on_a_gpu() -> None:
    with pytest.raises(LaunchError, match=r"fully_shard crashes where gloo.*cpu:gloo,cuda:nccl"):
        launch(train, "cuda", (1, 2), "bucketwise", "resharded", world_size=2)


class SlowSgd(torch.optim.SGD):
    """Its updates take long on the device, on whichever stream they run."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].is_cuda:
            torch.cuda._sleep(50_000_000)
        return super().step(closure)


def overtake(kind: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a forward pass computes right after an update, and what the same one computes later."""
    with make_model(kind, shape, {}, {}, partial(SlowSgd, lr=0.1)) as model:
        x = torch.ones(4, 6, device=next(model.module.parameters()).device, dtype=torch.float64)
        for _ in range(NUM_STEPS):
            model(x).square().mean().backward()
        with torch.no_grad():
            gathered = model(x)
        if kind == "cuda":
            torch.cuda.synchronize()
        model.module.reshard()
        with torch.no_grad():
            return gathered.cpu(), model(x).cpu()


@pytest.mark.parametrize(("backend", "shape"), CASES)
@needs_nccl
def test_a_forward_pass_gathers_what_the_update_before_it_has_written(backend: str, shape: tuple[int, int]) -> None:
    for gathered, later in launch(overtake, "cuda", shape, world_size=shape[0] * shape[1], backend=backend):
        assert torch.equal(gathered, later)


def steps_without_synchronisation(shape: tuple[int, int], by_hand: bool, options: dict[str, Any]) -> str:
    """What made the host wait for the device, or nothing. Not even by asking again and again whether it has ended."""
    device = choose_device("cuda")
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(device)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("gossip", "shard"))
    for layer in module:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(module, mesh=mesh["shard"])
    optimizer = adamw(module.parameters()) if by_hand else None
    model: Any = module
    if not by_hand:
        model = GossipDataParallel(module, adamw, "complete", mesh=mesh, bucket_cap_mb=0.01, **options)
    inputs = torch.randn(8, 64, device=device)

    def step() -> None:
        model(inputs).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):  # whatever is made once
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        waits = AssertionError("waits until the device is idle")
        with mock.patch.object(device_paths, "device_is_idle", side_effect=waits):
            for _ in range(5):
                step()
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if not by_hand:
        model.close()
    return ""


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}, {"compression": "bf16"}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@needs_nccl
def test_a_step_of_a_group_does_not_hold_the_host(shape: tuple[int, int], options: dict[str, Any]) -> None:
    start = partial(launch, steps_without_synchronisation, shape, world_size=shape[0] * shape[1], backend="nccl")
    by_hand = start(True, {})
    if any(by_hand):
        pytest.skip(f"fully_shard itself holds the host: {by_hand[0]}")
    assert not any(start(False, options))
