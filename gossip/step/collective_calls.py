"""The collective calls of a wrapped model between its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from gossip.step.collective_operations import CollectiveOperations
from gossip.step.engine import StepEngine


class CollectiveCalls:
    """The calls of the wrapper that every rank must make, between two steps."""

    _collective_operations: CollectiveOperations
    _live: Callable[[], StepEngine]

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks make different numbers of steps within the block. Collective.

        A rank that leaves the block keeps exchanging, without updates of its own, for as long as any other rank makes
        steps. All ranks leave it after the same number of steps.

        Raises
        ------
        ExchangeError
            The other ranks neither made a step nor left the block in time.
        """
        self._live()
        with self._collective_operations.join():
            yield

    @torch.inference_mode(False)
    def global_avg(self) -> None:
        """Replace parameters and float buffers by their mean over ranks, integer buffers by rank 0's. Collective.

        Extra states of modules (``get_extra_state()``) are replaced by rank 0's, too, if they are plain data. Messages
        in flight are awaited and dropped, so the replicas are equal. Training can continue; the round counter is not
        reset.

        Raises
        ------
        ExchangeError
            A rank is gone or did not take part in time. Nothing is left half summed: every value is either the mean or
            still this rank's own, and the text says which. Up to 64 MiB of parameters and buffers change together or
            not at all.
        """
        self._live()
        self._collective_operations.average()

    @contextlib.contextmanager
    def averaged(self, recalibrate: Iterable[Any] | None = None) -> Iterator[None]:
        """Hold the global average in the module within the block and restore the local replica afterwards. Collective.

        Parameters, buffers and extra states of modules are restored exactly, and messages in flight stay in flight:
        training continues bit for bit as if no average had been taken. Needs memory for one copy of parameters and
        buffers. No backward pass is allowed inside.

        Parameters
        ----------
        recalibrate : iterable, optional
            Batches of inputs, tuples that begin with the inputs, or mappings of the module's arguments. Batch norm's
            running statistics are then estimated anew for the averaged weights, from all ranks' batches, instead of
            being averaged. A rank may have no batches.

        Raises
        ------
        ValueError
            ``recalibrate`` is empty on all ranks.
        ExchangeError
            A rank is gone or did not take part in time; parameters and buffers have been restored.
        """
        self._live()
        with self._collective_operations.averaged(recalibrate):
            yield

    @torch.inference_mode(False)
    def consensus_distance(self) -> tuple[float, float]:
        r"""Return how far apart the replicas are: :math:`\sqrt{\frac1n \sum_i \|x_i - \bar x\|^2}`. Collective.

        Returns
        -------
        distance, relative : float
            The distance, and the distance divided by the norm of the mean; over parameters, not buffers.
        """
        self._live()
        return self._collective_operations.distance()
