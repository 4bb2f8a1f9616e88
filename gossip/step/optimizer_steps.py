"""Steps that are made where the user calls ``optimizer.step()``."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from gossip.errors import GossipError
from gossip.optimizers.closures import Closure, EvaluatedClosure, requires_closure
from gossip.step.engine import StepEngine


class OptimizerSteps(StepEngine):
    """Backward passes only accumulate gradients; all optimizers of a model together make one step."""

    def step_optimizer(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        self.check_usable()
        if closure is not None and not requires_closure(optimizer):
            closure = EvaluatedClosure(optimizer, closure)
            self.check_usable()
        with self.fatal():
            progress = self._progress
            if any(stepped is optimizer for stepped in progress.stepped):
                raise GossipError(
                    f"rank {self.rank}: step {self.step}: {type(optimizer).__name__}.step() was called twice, but not "
                    "every optimizer once; all optimizers of a model together make one step: step each of them once, "
                    "or wrap the parts of the model separately"
                )
            if not progress.stepped:
                self._begin_step()
                self.check_places()
                self._begin_all(looks_at_gradients=closure is None or isinstance(closure, EvaluatedClosure))
            with self._stepping_optimizers():
                result = self.updater.update_by(optimizer, closure, self.step, progress.meter, self._direct_once)
            progress.stepped.append(optimizer)
            if len(progress.stepped) == len(self.updater.optimizers):
                self.updater.settle_scale()
                self._end_all()
                self._finish_step()
            return result

    def _direct_once(self) -> None:
        if not self._progress.is_directed:
            self._progress.is_directed = True
            self._direct_all()

    def _make_rest(self) -> None:
        if self._progress.stepped:
            raise GossipError(
                f"rank {self.rank}: step {self.step}: idle_step() after one of several optimizers was stepped; "
                "step all of them, or none"
            )
        self._begin_all(looks_at_gradients=False)
        self.updater.idle()
        self._end_all()

    def _drop_dead_step(self) -> None:
        self._progress.backward = None
