"""Collective operations on models between steps, which the remaining ranks repeat if a rank is lost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from gossip.communication.world import World
from gossip.optimizers.schedule_free import check_evaluated, evaluate
from gossip.parameters.buckets import Bucket
from gossip.parameters.global_average import average_module_, consensus_distance, recalibrate_, snapshot
from gossip.step.building.construction import make_flag
from gossip.step.engine import StepEngine, do_nothing
from topologies.validation import check_real

if TYPE_CHECKING:
    from gossip.step.generation_change import GenerationChange

_Result = TypeVar("_Result")


class CollectiveOperations:
    """The calls of the wrapper that every rank must make, between two steps, and by how much it counts in them."""

    module: nn.Module
    _world: World
    _generations: GenerationChange | None
    _live: Callable[[], StepEngine]

    @torch.inference_mode(False)
    def weigh(self, samples: float) -> None:
        """Say how many samples, or tokens, each update of this rank counts from now on. Local.

        Call it before the backward pass whose gradients are applied, with the samples of all batches that are
        accumulated in it; what has been said holds for later updates too. Ranks with larger batches then count more in
        exchanges and averages over ranks. Steps without gradients, such as those at the end of :meth:`join`, count no
        samples.

        Parameters
        ----------
        samples : float
            Above 0 and finite.

        Raises
        ------
        GossipError
            The algorithm counts all ranks equally.
        """
        engine = self._live()
        engine.check_usable()
        engine.exchanges.algorithm.check_weighted()
        engine.exchanges.weigh(check_real("samples", samples, "above 0 and finite", example=32))

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
        engine = self._live()
        engine.check_between_steps()
        if engine.exchanges.algorithm.is_asynchronous:
            # No rank waits for another's steps; a rank that has left the block still averages with ranks that ask it.
            yield
            with engine.fatal():
                self._collectively(lambda: None)
            return
        with engine.fatal():
            flag = make_flag(self._world, "waiting in join() for the ranks that still train")
        outer = engine.on_step_begin

        def begin_step() -> None:
            flag.vote(True)
            outer()

        engine.on_step_begin, engine.is_in_join = begin_step, True
        try:
            yield
            engine.on_step_begin, engine.is_in_join = outer, False
            with engine.fatal():
                flag.vote(False)
                engine.on_forward()
                while flag.wait():
                    engine.idle_step()
                    flag.vote(False)
                    engine.on_forward()
                self._collectively(lambda: None)  # what the flag says in the next block concerns later steps
        finally:
            engine.on_step_begin, engine.is_in_join = outer, False
            flag.close()

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
        engine = self._live()
        check_evaluated(engine.updater.optimizers, "global_avg()")
        self._begin_together()
        engine.drop_in_flight()
        before = contextlib.ExitStack()

        def average() -> None:
            engine.frozen.compare()
            if self._world.changes:  # then it may be repeated
                before.callback(snapshot(self.module, self._buckets, engine.exchanges.message_as_sent))
                before.callback(engine.frozen.snapshot())
            self._average_()

        with engine.fatal():
            self._collectively(average, before.close)
            before.pop_all()
            engine.frozen.are_equal()
            engine.exchanges.averaged()

    @contextlib.contextmanager
    def averaged(self, recalibrate: Iterable[Any] | None = None) -> Iterator[None]:
        """Hold the global average in the module within the block and restore the local replica afterwards. Collective.

        Parameters, buffers and extra states of modules are restored exactly, and messages in flight stay in flight:
        training continues bit for bit as if no average had been taken. Needs memory for one copy of parameters and
        buffers; of those buckets none whose messages in flight are the values, as without compression. No backward
        pass is allowed inside.

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
        engine = self._live()
        self._begin_together()
        with contextlib.ExitStack() as before:

            def average() -> None:
                engine.frozen.compare()
                before.callback(engine.group.changed)
                before.callback(snapshot(self.module, self._buckets, engine.exchanges.message_as_sent))
                before.callback(engine.frozen.snapshot())
                before.callback(evaluate(engine.updater.optimizers))
                self._average_(is_put_back=True)

            with engine.fatal():
                self._collectively(average, before.close)
            engine.is_averaged, engine.put_back = True, before.close
            try:
                if recalibrate is not None:
                    recalibrate_(self.module, recalibrate, self._world)
                yield
            finally:
                engine.is_averaged, engine.put_back = False, do_nothing

    @torch.inference_mode(False)
    def consensus_distance(self) -> tuple[float, float]:
        r"""Return how far apart the replicas are: :math:`\sqrt{\frac1n \sum_i \|x_i - \bar x\|^2}`. Collective.

        Returns
        -------
        distance, relative : float
            The distance, and the distance divided by the norm of the mean; over parameters, not buffers.
        """
        engine = self._live()
        self._begin_together()

        def measure() -> tuple[float, float]:
            engine.frozen.compare()
            distance, norm = consensus_distance(self._buckets, engine.frozen, self._world, engine.weights())
            if engine.group.is_shared:
                squares = engine.group.sums((distance**2, norm**2), "consensus distance over the shard group")
                distance, norm = map(math.sqrt, squares)
            return distance, distance / norm if norm else 0.0

        with engine.fatal():
            return self._collectively(measure)

    @property
    def _buckets(self) -> list[Bucket]:
        """The buckets of the parameters that are exchanged, in launch order."""
        return [bucket for bucket in self._live().buckets if isinstance(bucket, Bucket)]

    def _collectively(self, operation: Callable[[], _Result], undo: Callable[[], object] = lambda: None) -> _Result:
        """Return the result of ``operation``, carried out with the remaining ranks."""

        def catch_up_and_operate() -> _Result:
            if self._generations is not None:
                self._generations.catch_up()  # exchange along the topology of those that do this together
            return operation()

        result = self._world.collectively(catch_up_and_operate, undo)
        self._live().group.complete_changes()
        return result

    def _begin_together(self) -> None:
        engine = self._live()
        engine.check_between_steps()
        self._world.check_joint()
        settle(engine, self._world)

    def _average_(self, *, is_put_back: bool = False) -> None:
        engine = self._live()
        average_module_(
            self.module, self._buckets, engine.frozen, self._world, engine.weights(), is_put_back=is_put_back
        )
        engine.group.average_buffers_()
        engine.group.changed()


def settle(engine: StepEngine, world: World) -> None:
    """Combine late messages, and those that the algorithm wants combined, before a collective operation."""
    engine.settle()
    engine.settle_late()
    if engine.exchanges.algorithm.is_asynchronous:
        # Once all ranks are here, none asks for an average any more, and what was asked of this rank has arrived.
        world.gather_bytes(b"", "waiting until all averages of two ranks are made")
        engine.settle_late()
