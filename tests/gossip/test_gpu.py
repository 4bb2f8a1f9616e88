"""CUDA tensors, through pinned memory over gloo and natively over NCCL, give what the CPU gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from replicas import SGD, TINY_BUCKETS, NormalisedNet

from gossip import ExchangeError, GossipDataParallel, launch

pytestmark = pytest.mark.gpu

WORLD_SIZE = 2
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_a_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason="torch.cuda.is_available() is False")
needs_nccl = pytest.mark.skipif(
    NUM_GPUS < WORLD_SIZE or not dist.is_nccl_available(), reason="NCCL needs one GPU for each of 2 ranks"
)


def train_on(kind: str, topology: str, debug: str | None, in_group: bool = False) -> tuple[list[torch.Tensor], float]:
    """State after training and averaging, and the consensus distance before it."""
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(dist.get_rank())
    group = dist.new_group(list(range(WORLD_SIZE))) if in_group else None
    model = GossipDataParallel(
        NormalisedNet().double().to(device),
        SGD,
        topology,
        bucket_cap_mb=TINY_BUCKETS,
        debug=debug,
        process_group=group,
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * model.rank + step)
        inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        model(inputs.to(device)).square().mean().backward()
    distance, _ = model.consensus_distance()
    with model.averaged():
        pass
    model.global_avg()
    state = [tensor.cpu() for tensor in model.state_dict().values()]
    model.close()
    return state, distance


@pytest.mark.parametrize("debug", [None, "detail"])
@pytest.mark.parametrize("topology", ["complete", "star", "directed_ring"])
@pytest.mark.parametrize(
    ("backend", "in_group"),
    [
        pytest.param("gloo", False, marks=needs_a_gpu),
        pytest.param("nccl", False, marks=needs_nccl),
        pytest.param("nccl", True, marks=needs_nccl),
        pytest.param("cpu:gloo,cuda:nccl", False, marks=needs_nccl),
    ],
)
def test_training_on_gpus_equals_training_on_cpus(
    backend: str, in_group: bool, topology: str, debug: str | None
) -> None:
    wanted = launch(train_on, "cpu", topology, None, world_size=WORLD_SIZE)
    found = launch(train_on, "cuda", topology, debug, in_group, world_size=WORLD_SIZE, backend=backend)
    for (state, distance), (expected, expected_distance) in zip(found, wanted, strict=True):
        assert distance == pytest.approx(expected_distance, rel=1e-6)
        for ours, theirs in zip(state, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def wrap_on_the_cpu() -> str:
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = GossipDataParallel(torch.nn.Linear(2, 1), SGD, "complete")
    with pytest.raises(ExchangeError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


@needs_nccl
def test_module_on_the_cpu_is_refused_by_nccl() -> None:
    for rank, text in enumerate(launch(wrap_on_the_cpu, world_size=WORLD_SIZE, backend="nccl")):
        assert text.startswith(f"rank {rank}: step 0, bucket 0: its parameters are on cpu, but the process group has a")
