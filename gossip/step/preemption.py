"""SIGTERM, which schedulers send before they reclaim a machine: this rank leaves, or all save and end together."""

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
from loguru import logger

from gossip.communication.host import daemon_threads
from gossip.elastic.elastic_world import ElasticWorld
from gossip.errors import EndedTogether, reason
from gossip.step.engine import StepEngine, do_nothing

#: A process that reaches no point within this time at which it can leave or save exits without.
PATIENCE = timedelta(seconds=30)
#: So long a rank waits, training, whether so many others receive SIGTERM too that all are to save.
WINDOW = timedelta(seconds=5)
EXIT_STATUS = 128 + signal.SIGTERM
_PAUSE_S = 0.5


class Preemption:
    """Leaves before the next forward pass after a SIGTERM, and exits with status 143.

    With ``on_preemption`` it leaves only after ``WINDOW``. If by then so many ranks have received SIGTERM that too few
    would remain, all ranks make the same number of steps, call ``on_preemption(model)`` and exit with status 143. A
    forward pass for training before the last of these steps is made as usual. In any other forward pass, and in place
    of a collective operation, a rank makes the steps that are missing without updates: it ends an evaluation, but not
    one that a shard group makes together. A shard group leaves, training, when one of its ranks is told to.

    The signal is handled in the main thread only, and only if SIGTERM has no other handler.
    """

    def __init__(
        self,
        engine: StepEngine,
        world: ElasticWorld,
        model: weakref.ref[Any],
        on_preemption: Callable[[Any], object] | None,
    ) -> None:
        self._engine, self._model, self._world = weakref.ref(engine), model, world
        self._on_preemption = on_preemption
        self._has_left = threading.Event()
        self._came_at: float | None = None
        self._ends = False

    def install(self) -> None:
        """Handle SIGTERM from now on until the model is closed. Local."""
        engine = self._engine()
        is_handled = _is_main() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if engine is None or not (is_handled or self._on_preemption is not None):
            return
        engine.on_forward, engine.on_close = self._on_forward, self._remove
        self._world.on_end = self._on_collective
        if is_handled:
            signal.signal(signal.SIGTERM, self.on_signal)

    def _remove(self) -> None:
        self._world.on_end = do_nothing
        # Unless another handler has been installed since.
        if _is_main() and signal.getsignal(signal.SIGTERM) == self.on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """React to SIGTERM. Local."""
        engine = self._engine()
        if engine is None or engine.error is not None or engine.is_parents:  # there are no other ranks to leave
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._came_at is None:
            self._came_at = time.monotonic()
            daemon_threads.start(
                "gossip-preemption", self._end_in_time, end=self._has_left.set, failed=lambda _: os._exit(EXIT_STATUS)
            )

    # ------------------------------------------------------------------ where the model is used

    def _on_forward(self) -> None:
        engine = self._engine()
        if engine is None or self._ends or engine.is_within_step or not _is_main():
            return
        ends_at = self._world.consensus.ends_at
        trains = torch.is_grad_enabled() and not engine.is_averaged
        if ends_at is not None:
            is_alone = self._world.group_size == 1
            if engine.step >= ends_at or (is_alone and not trains and self._world.consensus.can_end):
                self._end()
        elif self._world.consensus.has_left:
            self._exit_with_group()
        elif self._came_at is not None:
            waits = self._on_preemption is not None
            if not waits or time.monotonic() >= self._came_at + WINDOW.total_seconds():
                self._leave()

    def _on_collective(self) -> None:
        engine = self._engine()
        if engine is not None and engine.last_meter is not None and not self._ends and _is_main():
            if self._world.consensus.ends_at is None:
                self._exit_with_group()
            self._end()

    def _leave(self) -> None:
        rank, is_alone = self._world.member, self._world.group_size == 1
        try:
            if is_alone:
                model = self._interrupt()
                logger.warning("rank {}: SIGTERM: leaving at step {}", rank, model.step)
                model.leave()
            else:
                self._world.consensus.leave(waits=False)
                return
        except Exception as error:
            if self._world.consensus.ends_at is not None:  # meanwhile others have received the signal
                self._end()
            logger.error("rank {}: exiting without having left: {}", rank, reason(error))
        self._has_left.set()
        raise SystemExit(EXIT_STATUS)

    @torch.inference_mode(False)
    def _exit_with_group(self) -> NoReturn:
        model, self._ends = self._interrupt(), True
        logger.warning("rank {}: SIGTERM: its shard group leaves at step {}", self._world.member, model.step)
        self._has_left.set()
        model.leave()  # in place of a collective operation there may be steps that the others still make with it
        raise SystemExit(EXIT_STATUS)

    @torch.inference_mode(False)
    def _end(self) -> None:
        self._ends = True
        model, rank, ends_at = self._interrupt(), self._world.member, self._world.consensus.ends_at
        assert ends_at is not None
        assert self._on_preemption is not None
        while model.step < ends_at:
            model.idle_step()
        logger.warning("rank {}: SIGTERM: all ranks end together, this one after {} steps", rank, model.step)
        self._has_left.set()
        self._on_preemption(model)
        model.close()
        raise EndedTogether(EXIT_STATUS)

    def _interrupt(self) -> Any:
        """Return the model between two steps: no average of all replicas, and no gradients of a part of a step."""
        model, engine = self._model(), self._engine()
        assert model is not None
        assert engine is not None
        if engine.is_averaged:
            engine.is_averaged = False
            engine.put_back()
        engine.is_in_join = False
        model.zero_grad()
        return model

    # ------------------------------------------------------------------ the thread

    def _end_in_time(self) -> None:
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while True:
            if self._on_preemption is not None:
                with contextlib.suppress(Exception):  # raised where the model is used
                    self._world.consensus.tell_of_preemption()
            if self._has_left.wait(_PAUSE_S):
                return
            if time.monotonic() > deadline:
                os._exit(EXIT_STATUS)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
