"""Ranks on one machine read each other's messages where they lie."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from messages import received
from ranks import run_ranks

import topologies
from gossip import (
    BucketShape,
    Cast,
    Compression,
    DistributedTransport,
    ExchangeError,
    ModuloQuantization,
    Transport,
    Uncompressed,
    World,
    launch,
)
from gossip.communication import shared_memory

WORLD_SIZE = 4
NAMES = ("complete", "star", "directed_ring", "random_matching")
KINDS: dict[str, tuple[Compression, torch.dtype, float]] = {
    "float32": (Uncompressed(), torch.float32, 1e-6),
    "float64": (Uncompressed(), torch.float64, 1e-13),
    "bfloat16": (Uncompressed(), torch.bfloat16, 1e-6),
    "bf16 of float32": (Cast(torch.bfloat16), torch.float32, 1e-2),
    "int8": (ModuloQuantization(8), torch.float32, 5e-2),
}
SIZES = (40_001, 150_007, 5)  # the second goes over a network in pieces; the last one is too small to be read
NUM_STEPS = 5  # more than there are buffers


@functools.cache
def random_numbers() -> torch.Tensor:
    return torch.randn(2 * max(SIZES), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def values_of(rank: int, step: int, bucket: int, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers from another place on: to draw as many anew would take most of the time."""
    start = 1 + 1009 * (rank + WORLD_SIZE * step + WORLD_SIZE * NUM_STEPS * bucket)
    return random_numbers()[start : start + SIZES[bucket]].to(dtype, copy=True)


def memory_for(transport: Transport, bucket: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda message, step: transport.memory(message, step=step, bucket=bucket)


def exchange_everything(name: str, kind: str, shares_memory: bool) -> list[torch.Tensor]:
    """All that was mixed, which is the row of the mixing matrix."""
    compression, dtype, tolerance = KINDS[kind]
    topology = topologies.build(name, WORLD_SIZE)
    world = World(timedelta(seconds=60))
    transport = DistributedTransport(world, topology, shares_memory=shares_memory)
    shapes = [
        BucketShape(bucket, torch.empty(size, dtype=dtype), memory=memory_for(transport, bucket))
        for bucket, size in enumerate(SIZES)
    ]
    codecs = [compression.codec(shape, world.rank) for shape in shapes]
    found = []
    for step in range(NUM_STEPS):
        round_ = topology.round(step)
        if not round_.peers(world.rank):
            continue
        exchanges = []
        for bucket, codec in enumerate(codecs):
            values = values_of(world.rank, step, bucket, dtype)
            conversation = codec.begin(values, round_, step)
            exchanges.append(transport.start(conversation, round_, step=step, bucket=bucket))
            values.fill_(torch.nan)  # the message does not need it any more
        for bucket, exchange in enumerate(exchanges):
            difference = received(exchange)
            everyone = torch.stack([values_of(rank, step, bucket, dtype).double() for rank in range(WORLD_SIZE)])
            row = round_.matrix()[world.rank] @ everyone.numpy() - everyone[world.rank].numpy()
            assert np.abs(difference.double().numpy() - row).max() <= tolerance * everyone.abs().max()
            found.append(difference)
    assert len(transport.local_messages.local) == (WORLD_SIZE - 1 if shares_memory else 0)
    dist.barrier()
    world.close()
    return found


def exchange_both_ways(cases: list[tuple[str, str]]) -> None:
    for name, kind in cases:
        shared, apart = (exchange_everything(name, kind, shares_memory) for shares_memory in (True, False))
        tolerance = 0.0 if kind == "int8" else 2 * KINDS[kind][2]  # which is never added on the wire
        for one, other in zip(shared, apart, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance, msg=f"{name}, {kind}".__add__)


def test_what_is_read_is_what_a_network_would_have_brought() -> None:
    cases = [*((name, "float32") for name in NAMES), *(("ring", kind) for kind in KINDS)]
    run_ranks(exchange_both_ways, cases, world_size=WORLD_SIZE)


def hand_out_to_nobody() -> str:
    world = World(timedelta(seconds=60))
    transport = DistributedTransport(world, topologies.build("ring", 2))
    world.timeout = timedelta(seconds=2)  # once both are there
    message = torch.empty(SIZES[0])
    text = "nothing"
    if world.rank == 0:
        places = set()
        for step in range(3):
            places.add(transport.memory(message, step=step, bucket=0).data_ptr())
            transport.shared_messages[0].publish((1,))
        assert len(places) == 3  # nothing that is not read is overwritten
        with pytest.raises(ExchangeError) as caught:
            transport.memory(message, step=3, bucket=0)
        text = str(caught.value)
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return text


def test_a_peer_that_does_not_read_is_named() -> None:
    first, _ = launch(hand_out_to_nobody, world_size=2)
    assert first.startswith(
        "rank 0: step 3, bucket 0: timed out after 2 s waiting for rank 1 to read the message of 3 exchanges ago"
    )


def wait_for_what_is_not_sent() -> list[str]:
    """What rank 0 and a child forked from it are told."""
    world = World(timedelta(seconds=60))
    topology = topologies.build("ring", 2)
    transport = DistributedTransport(world, topology)
    world.timeout = timedelta(seconds=2)  # once both are there
    shape = BucketShape(0, torch.empty(SIZES[0]), memory=memory_for(transport, 0))
    texts = []
    if world.rank == 0:
        conversation = Uncompressed().codec(shape, 0).exchange(torch.zeros(SIZES[0]), topology.round(0), 0)
        exchange = transport.start(conversation, topology.round(0), step=0, bucket=0)

        def error_of_waiting() -> str:
            with pytest.raises(ExchangeError) as caught:
                exchange.wait()
            return str(caught.value)

        reader, writer = os.pipe()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                os.write(writer, error_of_waiting().encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            texts.append(pipe.read().decode())
        os.wait()
        texts.append(error_of_waiting())
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return texts


def test_a_peer_whose_message_does_not_come_is_named() -> None:
    (in_child, in_parent), _ = launch(wait_for_what_is_not_sent, world_size=2)
    assert "this process was forked from the one that trains" in in_child
    assert in_parent.startswith(
        "rank 0: step 0, bucket 0: timed out after 2 s waiting for the message from rank 1: rank 1 is"
    )


def pretend_to_be_elsewhere() -> tuple[int, int]:
    """Rank 0 in another network, as in a container of its own."""
    if dist.get_rank() == 0:
        machine = shared_memory.machine()
        shared_memory.machine = lambda: [*machine[:2], 0, *machine[3:]]
    world = World(timedelta(seconds=60))
    transport = DistributedTransport(world, topologies.build("complete", 3))
    local = transport.local_messages.local
    together = transport.local_messages.are_local((1, 2)), transport.local_messages.are_local((0, 1, 2))
    world.close()
    return len(local), int(together == (True, False))


def test_ranks_that_a_network_keeps_apart_use_it() -> None:
    assert launch(pretend_to_be_elsewhere, world_size=3) == [(0, 1), (1, 1), (1, 1)]
