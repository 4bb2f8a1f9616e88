"""Rows of all ranks are gathered and summed: through memory on one machine, and otherwise by the process group."""

import os
import signal
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import unsupervised
from ranks import error_of, on_ranks

from gossip import ExchangeError, World
from gossip.communication import row_collectives
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
