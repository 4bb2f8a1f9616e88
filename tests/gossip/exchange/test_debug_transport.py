"""A rank that is out of step, and bytes that changed on the way, are found and named; training is as without."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compressions import COMPRESSIONS, PER_MECHANISM
from exchanging import start
from ranks import error_of, on_ranks, run_ranks
from replicas import SGD, TINY_BUCKETS, assert_equal_states, rank_module, snapshot, train

from gossip import DebugTransport, Exchange, ExchangeError, GossipDataParallel, Transport, World
from gossip.compression.conversation import Conversation
from topologies import Round, Topology, build

NUM_BUCKETS = 3
FAULTY_RANK = 3


class FaultyTransport(Transport):
    """Passes on what `distort` makes of step, bucket, round and message; nothing of a step that it skips."""

    def __init__(
        self, world: World, topology: Topology, distort: Callable[..., tuple[int, int, Round, torch.Tensor]]
    ) -> None:
        self.inner = DebugTransport(world, topology)
        self.distort = distort

    def start(self, conversation: Conversation, round_: Round, *, step: int, bucket: int) -> Exchange:
        message = next(iter(conversation.opening.sent.values()))
        step, bucket, round_, message = self.distort(step, bucket, round_, message)
        return start(self.inner, message, round_, world=self.inner.world, step=step, bucket=bucket)


class FlippingGroup:
    """Sends one bit of every message wrongly."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def recv(self, *args: Any) -> Any:
        return self.group.recv(*args)

    def send(self, tensors: list[torch.Tensor], *args: Any) -> Any:
        wrong = tensors[0].clone()
        wrong.view(torch.uint8)[2] ^= 8
        return self.group.send([wrong], *args)


def swap_buckets(step: int, bucket: int, round_: Round, message: torch.Tensor) -> tuple[int, int, Round, torch.Tensor]:
    return step, {1: 2, 2: 1}.get(bucket, bucket) if step == 2 else bucket, round_, message


def use_other_weights(step: int, bucket: int, round_: Round, message: torch.Tensor) -> Any:
    return step, bucket, Round.from_matrix(round_.matrix() @ round_.matrix()) if step == 2 else round_, message


def send_another_dtype(step: int, bucket: int, round_: Round, message: torch.Tensor) -> Any:
    return step, bucket, round_, message.view(torch.int32).to(torch.float64) if (step, bucket) == (2, 1) else message


def exchange_steps(world: World, transport: Transport, topology: Topology) -> str:
    """Four steps of three buckets; what this rank is told in the end."""
    try:
        for step in range(4):
            round_ = topology.round(step)
            exchanges = [
                start(transport, torch.full((5,), float(bucket)), round_, world=world, step=step, bucket=bucket)
                for bucket in range(NUM_BUCKETS)
            ]
            for exchange in exchanges:
                exchange.wait()
    except ExchangeError as error:
        return str(error)
    return "nothing"


def wait_for_one_that_is_ahead(world: World, transport: Transport, topology: Topology) -> str:
    if world.rank == AWAITED:
        world.progress_markers.note_exchange("step 5, bucket 2")
    if world.rank == 0:
        exchange = start(transport, torch.ones(5), topology.round(0), world=world, step=0, bucket=0)
        return error_of(ExchangeError, exchange.wait)
    return "nothing"


AWAITED = next(iter(build("one_peer_exponential", 4).round(0).neighbours(0)))
CASES: list[tuple[str, Callable[..., Any] | str]] = [
    ("complete", swap_buckets),
    ("ring", use_other_weights),
    ("directed_ring", send_another_dtype),
    ("complete", "flip a bit"),
    ("one_peer_exponential", "go on to others"),
]


def exchange_with_each_fault() -> list[str]:
    """What this rank is told; in a world for each case, all at the same time, as most of it is waiting."""

    def in_world(topology_name: str, fault: Callable[..., Any] | str) -> Callable[[], str]:
        topology = build(topology_name, 4)
        world = World(timedelta(seconds=3))
        is_faulty = world.rank == FAULTY_RANK
        transport = (
            FaultyTransport(world, topology, fault)
            if is_faulty and callable(fault)
            else DebugTransport(world, topology)
        )
        if is_faulty and fault == "flip a bit":
            world.group = FlippingGroup(world.group)
        function = wait_for_one_that_is_ahead if fault == "go on to others" else exchange_steps
        return functools.partial(function, world, transport, topology)

    calls = [in_world(*case) for case in CASES]
    with ThreadPoolExecutor(len(calls)) as pool:
        texts = list(pool.map(lambda call: call(), calls))
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return texts


def test_each_fault_is_named() -> None:
    by_rank = run_ranks(exchange_with_each_fault, world_size=4)
    swapped, other_weights, other_dtype, flipped, gone_on = zip(*by_rank, strict=True)
    out_of_step = "rank 3 sent bucket 2 of step 2; one of the two ranks is out of step"
    assert swapped[0] == f"rank 0: step 2, bucket 1: {out_of_step}"
    other_round = "rank 3 mixes by another round; the topologies, their seeds or their versions differ"
    assert other_weights[0] == f"rank 0: step 2, bucket 0: {other_round}"
    other_module = "rank 3 sent 5 values of float64, expected 5 values of float32; the modules differ"
    assert other_dtype[2] == f"rank 2: step 2, bucket 1: {other_module}"
    for rank, text in enumerate(flipped[:3]):
        assert text.startswith(f"rank {rank}: step 0, bucket 0: the message from rank 3 was corrupted in transit")
    assert gone_on[0].startswith("rank 0: step 0, bucket 0: timed out after 3 s")
    assert gone_on[0].endswith(f"; rank {AWAITED} was last seen in step 5, bucket 2")


@pytest.mark.parametrize("name", PER_MECHANISM)
@on_ranks(4)
def test_compressed_training_is_the_same_under_debug(name: str) -> None:
    row, found = COMPRESSIONS[name], []
    topology = "one_peer_hypercube" if "one_peer_hypercube" in row.topologies else "ring"
    options = {"compression": row.make(0), "bucket_cap_mb": TINY_BUCKETS}
    for transport in ("distributed", "debug"):
        with GossipDataParallel(rank_module(), SGD, topology, transport=transport, **options) as model:
            train(model, range(8))
            found.append(snapshot(model))
    assert_equal_states(*found)
