"""Rows of all ranks are gathered and summed, and messages read, in memory on one machine, else by the network."""

import contextlib
import os
import signal
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import unsupervised
from ranks import error_of, on_ranks

import topologies
from gossip import BucketShape, DistributedTransport, ExchangeError, Uncompressed, World
from gossip.communication import row_collectives, shared_memory
from gossip.communication.row_collectives import RowCollectives

TIMEOUT = timedelta(seconds=60)
CHUNK_BYTES = 2**16
small_chunks = mock.patch.object(row_collectives, "_CHUNK_BYTES", CHUNK_BYTES)
DTYPES = torch.float32, torch.float64, torch.bfloat16


def numels(dtype: torch.dtype) -> list[int]:
    per_chunk = CHUNK_BYTES // dtype.itemsize
    return [1, 7, per_chunk, per_chunk + 1, 0, 4 * per_chunk + 3, 5, 5, 5, 5, 5]


@pytest.mark.parametrize("shares_memory", [True, False])
@on_ranks(3)
@small_chunks
def test_rows_of_all_ranks_are_gathered(shares_memory: bool) -> None:
    """Of any size: below a chunk, just one, and several; more often than there are buffers."""
    world = World(TIMEOUT)
    collectives = RowCollectives(world, shares_memory=shares_memory)
    assert collectives.gathers_in_memory == shares_memory
    cases = [(dtype, numel) for dtype in DTYPES for numel in numels(dtype)]
    for turn, (dtype, numel) in enumerate(cases):
        everyone = torch.stack(
            [torch.randn(numel, generator=torch.Generator().manual_seed(10 * turn + rank)) for rank in range(3)]
        ).to(dtype)
        rows = torch.full_like(everyone, -1.0)
        rows[world.rank] = everyone[world.rank]
        collectives.begin_gather(rows, f"turn {turn}")()
        assert torch.equal(rows, everyone)
    world.close()


@pytest.mark.parametrize(("shares_memory", "world_size"), [(True, 2), (True, 3), (False, 2)])
@on_ranks()
@small_chunks
def test_rows_for_this_rank_are_summed_to_the_bit_as_by_the_process_group(shares_memory: bool, world_size: int) -> None:
    world = World(TIMEOUT)
    collectives = RowCollectives(world, shares_memory=shares_memory)
    assert collectives.sums_in_memory == (shares_memory and world_size == 2)
    cases = ((dtype, numel, has_out) for dtype in DTYPES for has_out in (False, True) for numel in numels(dtype))
    for turn, (dtype, numel, has_out) in enumerate(cases):
        if numel == 0:
            continue
        everyone = [
            torch.randn(world_size, numel, generator=torch.Generator().manual_seed(10 * turn + rank)).to(dtype)
            for rank in range(world_size)
        ]
        out = torch.full([numel], -1.0, dtype=dtype) if has_out else None
        total = collectives.begin_sum(everyone[world.rank].clone(), f"turn {turn}", out=out)()
        if out is not None:
            assert total.data_ptr() == out.data_ptr()
        by_group = torch.empty(numel, dtype=dtype)
        dist.reduce_scatter_tensor(by_group, everyone[world.rank].view(-1))
        assert torch.equal(total, by_group), "not to the bit what the process group has"
        expected = sum(rows[world.rank] for rows in everyone)
        torch.testing.assert_close(total, expected, rtol=0, atol=8 * torch.finfo(dtype).eps)
    world.close()


@small_chunks
def stop_in_the_middle(how: str, sums: bool) -> str:
    """Rank 1 has published a first chunk when it stops, so that rank 0 waits for the second one."""
    world = World(TIMEOUT)
    world.timeout = timedelta(seconds=2)  # once both are there
    collectives = RowCollectives(world, shares_memory=True)
    rows = torch.zeros(2, CHUNK_BYTES)  # four chunks
    if dist.get_rank() == 1:
        wait_for = world.wait_for
        counts = iter(range(9))

        def stop(*args: object, **kwargs: object) -> object:
            if next(counts) == 1:
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            return wait_for(*args, **kwargs)  # type: ignore[arg-type]

        world.wait_for = stop  # type: ignore[method-assign, assignment]
    return error_of(
        ExchangeError, (collectives.begin_sum if sums else collectives.begin_gather)(rows, "step 3: moving rows")
    )


@pytest.mark.parametrize(("how", "sums"), [("killed", False), ("frozen", True)])
def test_a_rank_that_stops_is_named(how: str, sums: bool) -> None:
    text, _ = unsupervised.results_of(stop_in_the_middle, how, sums, world_size=2, silent={1})
    assert "rank 0: step 3: moving rows: " in text
    assert "rank 1 is " in text


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
