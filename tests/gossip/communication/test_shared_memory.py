"""Ranks on one machine that wait for each other in memory; what they read there is in the contract of transports."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from ranks import error_of, on_ranks

import topologies
from gossip import BucketShape, DistributedTransport, ExchangeError, Uncompressed, World
from gossip.communication import shared_memory

NUMEL = 40_001  # large enough to be read in memory


@on_ranks(2, anew=True)
def test_a_peer_that_does_not_read_is_named() -> None:
    world = World(timedelta(seconds=60))
    transport = DistributedTransport(world, topologies.build("ring", 2))
    world.timeout = timedelta(seconds=2)  # once both are there
    message = torch.empty(NUMEL)
    if world.rank == 0:
        places = set()
        for step in range(3):
            places.add(transport.memory(message, step=step, bucket=0).data_ptr())
            transport.shared_messages[0].publish((1,))
        assert len(places) == 3  # nothing that is not read is overwritten
        assert error_of(ExchangeError, transport.memory, message, step=3, bucket=0).startswith(
            "rank 0: step 3, bucket 0: timed out after 2 s waiting for rank 1 to read the message of 3 exchanges ago"
        )
    dist.monitored_barrier(timeout=timedelta(seconds=60))


@on_ranks(2, anew=True)
def test_a_peer_whose_message_does_not_come_is_named() -> None:
    """To rank 0, and what a child forked from it is told."""
    world = World(timedelta(seconds=60))
    topology = topologies.build("ring", 2)
    transport = DistributedTransport(world, topology)
    world.timeout = timedelta(seconds=2)  # once both are there
    shape = BucketShape(
        0, torch.empty(NUMEL), memory=lambda message, step: transport.memory(message, step=step, bucket=0)
    )
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
            assert "this process was forked from the one that trains" in pipe.read().decode()
        os.wait()
        assert error_of(ExchangeError, exchange.wait).startswith(
            "rank 0: step 0, bucket 0: timed out after 2 s waiting for the message from rank 1: rank 1 is"
        )
    dist.monitored_barrier(timeout=timedelta(seconds=60))


@on_ranks(3, anew=True)
def test_ranks_that_a_network_keeps_apart_use_it() -> None:
    """Rank 0 is in another network, as in a container of its own."""
    if dist.get_rank() == 0:
        machine = shared_memory.machine()
        shared_memory.machine = lambda: [*machine[:2], 0, *machine[3:]]
    world = World(timedelta(seconds=60))
    transport = DistributedTransport(world, topologies.build("complete", 3))
    assert len(transport.local_messages.local) == (0 if world.rank == 0 else 1)
    assert transport.local_messages.are_local((1, 2))
    assert not transport.local_messages.are_local((0, 1, 2))
    world.close()
