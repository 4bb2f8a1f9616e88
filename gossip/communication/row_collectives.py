"""Collectives of a world in which every rank has a row, begun at one time and awaited at another."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from gossip.communication.shared_memory import LocalMessages, SharedMessage
from gossip.communication.world import Post, World

_CHUNK_BYTES = 2 * 2**20
_GATHERED, _SUMMED = 0, 1  # the buckets of the messages


class RowCollectives:
    """Gathers and sums rows: through memory where all ranks are on this machine, and otherwise by the process group.

    With ``shares_memory``, rows that are in the memory of the host may go through memory that the ranks share, a chunk
    at a time. Construction is collective, and so is every method. All ranks begin the same gathers and sums, and wait
    for them, in the same order; ``what`` they are done for is for error texts.
    """

    def __init__(self, world: World, *, shares_memory: bool) -> None:
        self._world = world
        self._shared: dict[int, SharedMessage] = {}
        if world.is_alone:
            return
        self._messages = LocalMessages(world, shares_memory=shares_memory)
        if self._messages.are_local(range(world.world_size)):
            self._chunk_bytes = _CHUNK_BYTES
            # A sum of more than two depends on the order of the additions, and is to be the process group's to the bit.
            for bucket in (_GATHERED, _SUMMED) if world.world_size == 2 else (_GATHERED,):
                memory = torch.empty(self._chunk_bytes, dtype=torch.uint8)
                self._shared[bucket] = SharedMessage(self._messages, memory, bucket)

    @property
    def gathers_in_memory(self) -> bool:
        """Whether rows in the memory of the host are gathered through memory that the ranks share."""
        return _GATHERED in self._shared

    @property
    def sums_in_memory(self) -> bool:
        """Whether rows in the memory of the host are summed through memory that the ranks share."""
        return _SUMMED in self._shared

    def begin_gather(self, rows: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to fill in the rows of the other ranks, in place: an all-gather. Collective.

        Parameters
        ----------
        rows : Tensor, [world_size, ...], contiguous
            This rank's row holds its values; shape and dtype are the same on all ranks.

        Returns
        -------
        callable
            Waits until all rows are there; on a device only what follows there waits. Raises ExchangeError if a rank
            did not take part in time.
        """
        if self._world.is_alone:
            return lambda: None
        if self.gathers_in_memory and rows.is_cpu:
            return partial(self._gather_in_memory, rows.view(len(rows), -1).view(torch.uint8), what)
        data = self._world.on_wire(rows)
        own = data[self._world.rank].reshape(-1).clone()
        wait = self._begin(self._world.group._allgather_base, own, data.view(-1), what)

        def finish() -> None:
            wait()
            if data is not rows:
                rows.copy_(data)

        return finish

    def begin_sum(
        self, rows: torch.Tensor, what: str, *, out: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor]:
        """Begin to sum, over the ranks, what they have for each of them: a reduce-scatter. Collective.

        Parameters
        ----------
        rows : Tensor, [world_size, numel], contiguous
            A row for each rank; shape and dtype are the same on all ranks. This rank's may be overwritten.
        out : Tensor, [numel], optional
            Where to put the sum of this rank's rows.

        Returns
        -------
        callable
            Waits as that of :meth:`begin_gather` does, and returns the sum.
        """
        if self._world.is_alone:
            return lambda: rows[0] if out is None else out.copy_(rows[0])
        if self.sums_in_memory and rows.is_cpu:
            return partial(self._sum_in_memory, rows, rows[self._world.rank] if out is None else out, what)
        data = self._world.on_wire(rows)
        summed = torch.empty_like(data[0])
        wait = self._begin(self._world.group._reduce_scatter_base, data.view(-1), summed, what)

        def finish() -> torch.Tensor:
            wait()
            return summed.to(rows.device) if out is None else out.copy_(summed)

        return finish

    def _begin(
        self, operation: Callable[..., object], sent: torch.Tensor, received: torch.Tensor, what: str
    ) -> Callable[[], None]:
        posts: list[Post] = [lambda sent, received: operation(received[0], sent[0])]
        return self._world.begin(posts, [sent], [received], what, holds_host=False)

    def _gather_in_memory(self, rows: torch.Tensor, what: str) -> None:
        for chunk in rows.split(self._chunk_bytes, dim=1):
            for rank, theirs in self._shown(_GATHERED, chunk[self._world.rank], what):
                chunk[rank].copy_(theirs)

    def _sum_in_memory(self, rows: torch.Tensor, total: torch.Tensor, what: str) -> torch.Tensor:
        (other,) = self._world.others
        length = self._chunk_bytes // rows.element_size()
        for chunk, part in zip(rows.split(length, dim=1), total.split(length), strict=True):
            for _, theirs in self._shown(_SUMMED, chunk[other], what):
                torch.add(chunk[self._world.rank], theirs, out=part)
        return total

    def _shown(self, bucket: int, chunk: torch.Tensor, what: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Show the others a chunk, and yield theirs by rank, in place."""
        shared, others = self._shared[bucket], self._world.others
        shared.take(what)[: chunk.nbytes].view(chunk.dtype).copy_(chunk)
        shared.publish(others)
        for rank in others:
            reading = self._messages.expect(rank, bucket)
            if (failure := self._world.wait_for(reading, what, partial(list, (rank,)))) is not None:
                raise self._world.not_called(failure, what)
            yield rank, reading.buffer.message[: chunk.nbytes].view(chunk.dtype)
            reading.done()
