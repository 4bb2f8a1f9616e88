"""Collective operations on models between steps, which the remaining ranks repeat if a rank is lost."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

from gossip.communication.world import World
from gossip.optimizers.schedule_free import check_evaluated, evaluate
from gossip.parameters.buckets import Bucket
from gossip.parameters.extra_state import broadcast_extra_states
from gossip.parameters.global_average import average_module_, consensus_distance, recalibrate_, snapshot
from gossip.step.building.construction import make_flag
from gossip.step.engine import StepEngine

_Result = TypeVar("_Result")


class CollectiveOperations:
    """The collective operations of one model between its steps. Only construction is local.

    Parameters
    ----------
    module : Module
        The module that is trained.
    engine : StepEngine
        Makes the steps.
    world : World
        The ranks.

    Attributes
    ----------
    catch_up : callable
        Called before each operation, and before the remaining ranks repeat it.
    """

    def __init__(self, module: nn.Module, engine: StepEngine, world: World) -> None:
        self.catch_up: Callable[[], None] = lambda: None
        self._module, self._engine, self._world = module, engine, world

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the parameters that are exchanged, in launch order."""
        return [bucket for bucket in self._engine.buckets if isinstance(bucket, Bucket)]

    def collectively(self, operation: Callable[[], _Result]) -> _Result:
        """Return the result of ``operation``, carried out with the remaining ranks."""

        def catch_up_and_operate() -> _Result:
            self.catch_up()
            return operation()

        return self._world.collectively(catch_up_and_operate)

    def average(self) -> None:
        """Implement :meth:`gossip.GossipDataParallel.global_avg`."""
        engine = self._engine
        check_evaluated(engine.updater.optimizers, "global_avg()")
        self._begin()
        engine.drop_in_flight()
        before = contextlib.ExitStack()

        def average() -> None:
            self.catch_up()
            engine.frozen.compare()
            if self._world.may_repeat:
                before.callback(snapshot(self._module, self.buckets))
                before.callback(engine.frozen.snapshot())
            self._average()

        with engine.fatal():
            self._world.collectively(average, before.close)
            before.pop_all()
            engine.frozen.are_equal()
            engine.exchanges.averaged()

    @contextlib.contextmanager
    def averaged(self, recalibrate: Iterable[Any] | None) -> Iterator[None]:
        """Implement :meth:`gossip.GossipDataParallel.averaged`."""
        engine = self._engine
        self._begin()
        with contextlib.ExitStack() as before:

            def average() -> None:
                self.catch_up()
                engine.frozen.compare()
                if engine.shards is not None:
                    before.callback(engine.shards.changed)
                before.callback(snapshot(self._module, self.buckets))
                before.callback(engine.frozen.snapshot())
                before.callback(evaluate(engine.updater.optimizers))
                self._average(is_put_back=True)

            with engine.fatal():
                self._world.collectively(average, before.close)
            engine.is_averaged = True
            try:
                if recalibrate is not None:
                    recalibrate_(self._module, recalibrate, self._world)
                yield
            finally:
                engine.is_averaged = False

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Implement :meth:`gossip.GossipDataParallel.join`."""
        engine = self._engine
        engine.check_between_steps()
        if engine.exchanges.algorithm.is_asynchronous:
            # No rank waits for another's steps; a rank that has left the block still averages with ranks that ask it.
            yield
            with engine.fatal():
                self.collectively(lambda: None)
            return
        with engine.fatal():
            flag = make_flag(self._world, "waiting in join() for the ranks that still train")
        outer = engine.on_step_begin

        def begin_step() -> None:
            flag.vote(True)
            if outer is not None:
                outer()

        engine.on_step_begin, engine.is_in_join = begin_step, True
        try:
            yield
            engine.on_step_begin, engine.is_in_join = outer, False
            with engine.fatal():
                flag.vote(False)
                while flag.wait():
                    engine.idle_step()
                    flag.vote(False)
                self.collectively(lambda: None)  # what the flag says in the next block concerns later steps
        finally:
            engine.on_step_begin, engine.is_in_join = outer, False
            flag.close()

    def distance(self) -> tuple[float, float]:
        """Implement :meth:`gossip.GossipDataParallel.consensus_distance`."""
        engine = self._engine
        self._begin()

        def measure() -> tuple[float, float]:
            engine.frozen.compare()
            distance, norm = consensus_distance(self.buckets, engine.frozen, self._world, engine.weights())
            if engine.shards is not None:
                squares = engine.shards.sums((distance**2, norm**2), "consensus distance over the shard group")
                distance, norm = map(math.sqrt, squares)
            return distance, distance / norm if norm else 0.0

        with engine.fatal():
            return self.collectively(measure)

    def _begin(self) -> None:
        self._engine.check_between_steps()
        self._world.check_joint()
        settle(self._engine, self._world)

    def _average(self, *, is_put_back: bool = False) -> None:
        engine = self._engine
        average_module_(
            self._module, self.buckets, engine.frozen, self._world, engine.weights(), is_put_back=is_put_back
        )
        if engine.shards is not None:
            engine.shards.average_buffers_()
            broadcast_extra_states(self._module, engine.shards.world)
            engine.shards.changed()


def settle(engine: StepEngine, world: World) -> None:
    """Combine late messages, and those that the algorithm wants combined, before a collective operation."""
    engine.settle()
    engine.settle_late()
    if engine.exchanges.algorithm.is_asynchronous:
        # Once all ranks are here, none asks for an average any more, and what was asked of this rank has arrived.
        world.gather_bytes(b"", "waiting until all averages of two ranks are made")
        engine.settle_late()
