"""CUDA tensors, through pinned memory over gloo and natively over NCCL, give what the CPU gives."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from algorithm_table import ROWS, make_algorithm, optimizer_for
from compressions import COMPRESSIONS, TOPOLOGIES
from devices import NUM_GPUS, choose_device, needs_a_gpu, needs_nccl
from exchanging import Ranks, StackedRanks
from ranks import on_ranks
from replicas import SGD, TINY_BUCKETS, NormalisedNet, saved
from separate import stacked

import gossip
import topologies

pytestmark = pytest.mark.gpu

WORLD_SIZE = 2


def train_on(
    kind: str, topology: str, in_group: bool = False, compression: str | None = None
) -> tuple[list[torch.Tensor], float]:
    """State after training and averaging, and the consensus distance before it."""
    device = choose_device(kind)
    torch.manual_seed(dist.get_rank())
    group = dist.new_group(list(range(WORLD_SIZE))) if in_group else None
    codec = None if compression is None else COMPRESSIONS[compression].make(0)
    model = gossip.GossipDataParallel(
        NormalisedNet().double().to(device),
        SGD,
        topology,
        compression=codec,
        bucket_cap_mb=TINY_BUCKETS,
        process_group=group,
    )
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * model.rank + step)
        inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        model(inputs.to(device)).square().mean().backward()
    distance, _ = model.consensus_distance()
    model.global_avg()
    return [tensor.cpu() for tensor in model.state_dict().values()], distance


@pytest.mark.parametrize("topology", ["complete", "star", "directed_ring"])
@pytest.mark.parametrize(
    ("backend", "in_group"), [("gloo", False), ("nccl", False), ("nccl", True), ("cpu:gloo,cuda:nccl", False)]
)
@needs_nccl
def test_training_on_gpus_equals_training_on_cpus(backend: str, in_group: bool, topology: str) -> None:
    wanted = gossip.launch(train_on, "cpu", topology, world_size=WORLD_SIZE)
    found = gossip.launch(train_on, "cuda", topology, in_group, world_size=WORLD_SIZE, backend=backend)
    for (state, distance), (expected, expected_distance) in zip(found, wanted, strict=True):
        assert distance == pytest.approx(expected_distance, rel=1e-6)
        for ours, theirs in zip(state, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def train_by_every_algorithm(kind: str, folder: str) -> dict[str, torch.Tensor]:
    """Saved and loaded in between."""
    device, found = choose_device(kind), {}
    for label, row in ROWS.items():
        if label == "asynchronous":  # what it computes depends on time
            continue
        algorithm, topology = make_algorithm(label), next(name for name in row.topologies if name != "pushed")
        module = NormalisedNet().double().to(device)
        options = {"algorithm": algorithm, "bucket_cap_mb": TINY_BUCKETS}
        with gossip.GossipDataParallel(module, optimizer_for(label), topology, **options) as model:
            for step in range(6):
                if step == 3:
                    gossip.load(model, gossip.save(model, f"{folder}/{kind}/{label}"))
                if algorithm.weighted:
                    model.weigh(1 + model.rank)
                generator = torch.Generator().manual_seed(100 * model.rank + step)
                inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
                model(inputs.to(device)).square().mean().backward()
            model.global_avg()
            found[label] = torch.cat([parameter.detach().flatten().cpu() for parameter in module.parameters()])
    return found


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@needs_nccl
def test_every_algorithm_on_gpus_is_that_on_cpus(backend: str, tmp_path: Path) -> None:
    wanted = gossip.launch(train_by_every_algorithm, "cpu", str(tmp_path), world_size=WORLD_SIZE)
    found = gossip.launch(train_by_every_algorithm, "cuda", str(tmp_path), world_size=WORLD_SIZE, backend=backend)
    for ours, theirs in zip(found, wanted, strict=True):
        for label, values in theirs.items():
            # Adam divides the rounding of gradients that batch norm makes 0 by its own size.
            bound = 1e-6 if label.startswith("adam_tracking") else 1e-9
            torch.testing.assert_close(ours[label], values, rtol=bound, atol=bound, msg=label)


@needs_a_gpu
def test_parameters_on_a_gpu_have_storages_of_their_own() -> None:
    device = torch.device("cuda", NUM_GPUS - 1)  # where there are several, not the current one
    module = NormalisedNet().to(device)
    lengths = [len(saved(module.state_dict())), len(saved(module.first.bias))]
    sizes = {name: parameter.numel() * parameter.itemsize for name, parameter in module.named_parameters()}
    with gossip.GossipDataParallel(module, SGD, bucket_cap_mb=TINY_BUCKETS) as model:
        for edited in (False, True):
            if edited:
                module.first.bias.data = torch.ones(6, device=device)
            model(torch.ones(8, 4, device=device)).square().mean().backward()
            assert {name: each.untyped_storage().nbytes() for name, each in model.named_parameters()} == sizes
            assert [len(saved(model.state_dict())), len(saved(module.first.bias))] == lengths
            held = [bucket.block.data_ptr() for bucket in model._buckets]
            assert {bucket.parameters[0].data_ptr() for bucket in model._buckets} == set(held)


@needs_nccl
@on_ranks(WORLD_SIZE, anew=True, backend="nccl")
def test_module_on_the_cpu_is_refused_by_nccl() -> None:
    choose_device("cuda")
    model = gossip.GossipDataParallel(torch.nn.Linear(2, 1), SGD, "complete")
    text = f"^rank {model.rank}: step 0, bucket 0: its parameters are on cpu, but the process group only has a"
    with pytest.raises(gossip.ExchangeError, match=text):
        model(torch.ones(1, 2)).sum().backward()


# ---------------------------------------------------------------------- compression, streams, synchronisation


@needs_a_gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_lattice_on_a_gpu_is_the_one_on_the_cpu(bits: int) -> None:
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    messages, points = [], []
    for device in ("cpu", "cuda"):
        ranks = Ranks(gossip.ModuloQuantization(bits), topologies.build("complete", 2), [values, values + 0.01])
        ranks.mix(0)
        codec = gossip.ModuloQuantization(bits).codec(gossip.BucketShape(0, values.to(device)), 0)
        codec.load_state_dict(ranks.codecs[0].state_dict())
        conversation = codec.exchange(values.to(device), topologies.build("complete", 2).round(1), 1)
        messages.append(conversation.opening.sent[1].cpu())
        points.append(codec.sent.cpu())
    assert torch.equal(*messages)
    assert torch.equal(*points)


@needs_a_gpu
@pytest.mark.parametrize("name", ["int8", "int4", "choco", "choco random_k", "choco sign"])
@pytest.mark.parametrize("topology", ["ring", "star"])
def test_codecs_of_all_ranks_on_a_gpu_are_those_on_the_cpu(name: str, topology: str) -> None:
    size = TOPOLOGIES[topology].world_size
    values = 0.1 * torch.randn(size, 10_007, generator=torch.Generator().manual_seed(0))
    ranks = {
        device: StackedRanks(COMPRESSIONS[name].make(0), TOPOLOGIES[topology], list(values.to(device)))
        for device in ("cpu", "cuda")
    }
    for step in range(4):
        states = [ranks["cpu"].codec.state_dict(rank) for rank in range(size)]
        ranks["cuda"].codec.load_state_dicts(states)
        ranks["cuda"].stacked.copy_(ranks["cpu"].stacked)
        arrivals = {device: replicas.exchange(step) for device, replicas in ranks.items()}
        assert arrivals["cuda"].num_bytes == arrivals["cpu"].num_bytes
        difference = arrivals["cpu"].differences[0]
        torch.testing.assert_close(arrivals["cuda"].differences[0].cpu(), difference, rtol=0, atol=1e-6)
        ranks["cpu"].stacked += difference


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
@needs_nccl
def test_compressed_training_on_gpus_is_near_that_on_cpus(backend: str, name: str) -> None:
    train = functools.partial(
        gossip.launch, train_on, "cuda", "complete", False, name, world_size=WORLD_SIZE, backend=backend
    )
    if backend == "nccl" and COMPRESSIONS[name].make(0).follows_up:
        with pytest.raises(gossip.LaunchError, match=r"checks every message on the host"):
            train()
        return
    wanted, found = gossip.launch(train_on, "cpu", "complete", False, name, world_size=WORLD_SIZE), train()
    for (state, _), (expected, _) in zip(found, wanted, strict=True):
        for ours, theirs in zip(state, expected, strict=True):
            # A gradient that differs in its last bit may round to the next point of a lattice.
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("compression", [None, "bf16", "fp16"])
@needs_nccl
@on_ranks(anew=True, backend="nccl")
def test_a_step_does_not_hold_the_host(world_size: int, compression: str | None) -> None:
    """NCCL's exchange, a fused optimizer, and no moment at which the host waits for the device."""
    device = choose_device("cuda")
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to(device)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    model = gossip.GossipDataParallel(module, adamw, "complete", compression=compression, bucket_cap_mb=0.02)
    inputs = torch.randn(8, 64, device=device)
    for _ in range(3):  # whatever is made once
        model(inputs).square().mean().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            model(inputs).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (model.world_size, model.step) == (world_size, 8)


@needs_a_gpu
@pytest.mark.parametrize("topology", ["complete", "ring", "one_peer_exponential"])
def test_virtual_workers_on_a_gpu_train_as_on_the_cpu(topology: str) -> None:
    found = []
    for devices in (["cpu"], ["cuda:0"], ["cuda:0", "cuda:0"], ["cpu", "cuda:0"]):
        torch.manual_seed(0)
        module = NormalisedNet().double()
        workers = gossip.VirtualWorkers(module, 9, SGD, topology, bucket_cap_mb=TINY_BUCKETS, devices=devices)
        for step in range(4):
            inputs = torch.randn(31, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            workers(inputs.to(devices[0])).square().mean().backward()
        buffers: dict[str, list[torch.Tensor]] = {}
        for name, stack in workers.named_buffers():
            buffers.setdefault(name, []).append(stack.cpu())
        found.append(stacked(workers) | {name: torch.cat(stacks) for name, stacks in buffers.items()})
        assert workers.is_vectorised
    for other in found[1:]:
        for name, values in found[0].items():
            torch.testing.assert_close(other[name], values, rtol=1e-6, atol=1e-6)


@needs_a_gpu
def test_virtual_workers_on_a_gpu_resume_with_their_random_numbers(tmp_path: Path) -> None:
    def make() -> gossip.VirtualWorkers:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        return gossip.VirtualWorkers(module, 3, SGD, devices=["cuda:0"])

    def train_for(workers: gossip.VirtualWorkers, steps: int) -> dict[str, torch.Tensor]:
        for _ in range(steps):
            workers(torch.ones(6, 4, device="cuda:0")).square().mean().backward()
        return stacked(workers)

    workers, resumed = make(), make()
    train_for(workers, 2)
    gossip.save(workers, tmp_path)
    wanted = train_for(workers, 2)
    gossip.load(resumed, tmp_path)
    for name, values in train_for(resumed, 2).items():
        torch.testing.assert_close(values, wanted[name], rtol=1e-6, atol=1e-6)
