"""Ranks on one machine that wait for each other in memory; what they read there is in the contract of transports."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import error_of

import topologies
from gossip import BucketShape, DistributedTransport, ExchangeError, Uncompressed, World, launch
from gossip.communication import shared_memory

NUMEL = 40_001  # large enough to be read in memory


def hand_out_to_nobody() -> str:
    world = World(timedelta(seconds=60))
    transport = DistributedTransport(world, topologies.build("ring", 2))
    world.timeout = timedelta(seconds=2)  # once both are there
    message = torch.empty(NUMEL)
    text = "nothing"
    if world.rank == 0:
        places = set()
        for step in range(3):
            places.add(transport.memory(message, step=step, bucket=0).data_ptr())
            transport.shared_messages[0].publish((1,))
        assert len(places) == 3  # nothing that is not read is overwritten
        text = error_of(ExchangeError, transport.memory, message, step=3, bucket=0)
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
    shape = BucketShape(
        0, torch.empty(NUMEL), memory=lambda message, step: transport.memory(message, step=step, bucket=0)
    )
    texts = []
    if world.rank == 0:
        conversation = Uncompressed().codec(shape, 0).exchange(torch.zeros(NUMEL), topology.round(0), 0)
        exchange = transport.start(conversation, topology.round(0), step=0, bucket=0)
        reader, writer = os.pipe()
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                os.write(writer, error_of(ExchangeError, exchange.wait).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            texts.append(pipe.read().decode())
        os.wait()
        texts.append(error_of(ExchangeError, exchange.wait))
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
