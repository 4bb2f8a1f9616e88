"""The ranks that gossip with each other, and the few collectives over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gossip.courier import Courier, Works
from gossip.errors import ExchangeError

_GROUP_TIMEOUT_FACTOR = 2  # ours passes first: its message names who and what, gloo's only an address
_AVERAGE_CHUNK_BYTES = 64 * 2**20
CLOSING_PATIENCE = timedelta(seconds=1)
"""How long the end of communication may take before what is stuck is left alone."""


class World:
    """All ranks of one wrapped model; with one process and no process group, a world of one.

    Parameters
    ----------
    timeout : timedelta
        How long any wait may take before it raises.

    Attributes
    ----------
    rank, world_size : int
    group : ProcessGroup or None
        A group of its own, so that nothing here meets the user's traffic; None in a world of one.
    courier : Courier or None
        Carries all communication of this world, in one order.

    Raises
    ------
    ValueError
        ``timeout`` is not positive.
    RuntimeError
        The environment says that there are several processes, but ``torch.distributed`` is not initialised.

    Notes
    -----
    Collective: every rank of the default process group must construct it.
    """

    def __init__(self, timeout: timedelta) -> None:
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}; write timedelta(seconds=...)")
        if not timeout > timedelta(0):
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.timeout = timeout
        self.rank, self.world_size = 0, 1
        self.group: dist.ProcessGroup | None = None
        self._groups: list[dist.ProcessGroup] = []
        self.courier: Courier | None = None
        if dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised; call "
                "torch.distributed.init_process_group first, or start the function with gossip.launch"
            )
        if self.world_size > 1:
            self.group = self.new_group(range(self.world_size))
            self.courier = Courier(f"gossip-{self.rank}")

    def new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A communicator of ``ranks``, given back by :meth:`close`. Collective, also for ranks outside it.

        Raises
        ------
        ExchangeError
            Some rank did not take part in time.
        """
        patience = _GROUP_TIMEOUT_FACTOR * self.timeout
        try:
            group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=patience)
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank}: making a communicator of ranks {list(ranks)}: not all of the {self.world_size} "
                f"ranks took part within {patience.total_seconds():g} s; every rank must construct the model ({error})"
            ) from error
        if self.rank in ranks:
            self._groups.append(group)
        return group

    def gather_bytes(self, payload: bytes, what: str) -> list[bytes]:
        """Every rank's ``payload``, by rank. Collective. (Plain bytes: nothing a peer sends is ever unpickled.)"""
        if self.group is None:
            return [payload]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self._run(lambda: dist.all_gather(sizes, torch.tensor([len(payload)]), self.group, async_op=True), what)
        longest = max(int(size) for size in sizes)
        mine = torch.frombuffer(bytearray(payload.ljust(max(longest, 1), b"\0")), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._run(lambda: dist.all_gather(everyone, mine, self.group, async_op=True), what)
        return [bytes(data[: int(size)].tolist()) for data, size in zip(everyone, sizes, strict=True)]

    def broadcast_(self, tensor: torch.Tensor, what: str) -> None:
        """Rank 0's values into ``tensor``, of any dtype, in place. Collective."""
        if self.group is None or tensor.numel() == 0:
            return
        # As bytes: gloo knows some dtypes only, but it copies all alike.
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self._run(lambda: dist.broadcast(data, 0, self.group, async_op=True), what)
        if data.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))

    def average_(self, tensor: torch.Tensor, what: str) -> None:
        """The mean over ranks into ``tensor``, in place. Collective. Half precision is summed in float32.

        A tensor that is not contiguous, or not of float32 or float64, goes through one chunk of memory.
        """
        if self.group is None or tensor.numel() == 0:
            return
        dtype = accumulation_dtype(tensor.dtype)
        if tensor.dtype == dtype and tensor.is_contiguous():
            self.sum_(tensor, what)
            tensor.div_(self.world_size)
            return
        flat = tensor.reshape(-1)
        for chunk in flat.split(_AVERAGE_CHUNK_BYTES // dtype.itemsize):
            wide = chunk.to(dtype)
            self.sum_(wide, what)
            chunk.copy_(wide.div_(self.world_size))
        tensor.copy_(flat.view(tensor.shape))

    def sum_(self, tensor: torch.Tensor, what: str) -> None:
        """The sum over ranks into ``tensor``, in place. Collective."""
        if self.group is not None:
            self._run(lambda: dist.all_reduce(tensor, group=self.group, async_op=True), what)

    def close(self) -> None:
        """End the courier and give all communicators back, unless a peer that is stuck holds them. Local."""
        if self.courier is not None and self.courier.close(CLOSING_PATIENCE) and dist.is_initialized():
            for group in self._groups:
                dist.destroy_process_group(group)
        self._groups.clear()
        self.courier = self.group = None

    def _run(self, post: Callable[[], dist.Work | None], what: str) -> None:
        assert self.courier is not None
        ticket = self.courier.submit(lambda: named("all other ranks", post()))
        if not ticket.wait(self.timeout):
            raise ExchangeError(
                f"rank {self.rank}: {what}: not all of the {self.world_size} ranks took part within "
                f"{self.timeout.total_seconds():g} s; every rank must call it, after the same number of steps"
            )
        if ticket.error is not None:
            raise ExchangeError(f"rank {self.rank}: {what}: {ticket.error}") from ticket.error


def named(name: str, work: dist.Work | None) -> Works:
    """One asynchronous operation's handle with the name of whom it waits for."""
    assert work is not None, "every rank here is a member of the group"
    return ((name, work),)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed: float64 for itself, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
