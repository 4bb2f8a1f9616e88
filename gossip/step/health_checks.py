"""Checks whether a model can continue: after errors, after backward passes that died, alongside other threads."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta

from loguru import logger

from gossip.communication.host import forks
from gossip.errors import GenerationEndedError, GossipError
from gossip.exchange.rank_exchanges import AnyBucket
from gossip.private_torch import is_in_backward
from gossip.step.backward_pass import DEAD_BACKWARD, StepProgress
from gossip.step.local_update import Updater

_LETTING_GO = timedelta(milliseconds=100)


class HealthChecks:
    """What :class:`gossip.step.engine.StepEngine` checks before anything is done with its model, in any thread."""

    is_parents = False  # else this process was forked from the one that trains

    def __init__(self, buckets: Sequence[AnyBucket], updater: Updater) -> None:
        self.buckets = list(buckets)
        self.updater = updater
        self.group = updater.group  # the ranks that train a replica together
        self.rank = updater.rank
        self.step = self.generation = 0  # steps made, and so the index of the next round; of the training ranks
        self.is_averaged = False  # the buckets temporarily hold the global average
        self.is_in_join = False  # ranks may temporarily be at different steps
        self.error: BaseException | None = None  # ended training here, so that the ranks are no longer in step
        self._progress = StepProgress(buckets)
        self._lock = threading.RLock()  # held against forward passes in other threads

    def refusal(self, text: str) -> GossipError:
        """Return an error that names rank and step."""
        return GossipError(f"rank {self.rank}: step {self.step}: {text}")

    def check_alive(self) -> None:
        """Raise if this rank cannot continue, after an error or after a backward pass that died half-way."""
        if self.error is not None:
            raise GossipError(
                f"rank {self.rank}: cannot train or average after: {str(self.error) or repr(self.error)}"
            ) from self.error
        self._recover_from_dead_backward()

    @property
    def is_within_step(self) -> bool:
        """Whether the user has stepped some optimizers, and is to step others."""
        return bool(self._progress.stepped)

    def check_between_steps(self) -> None:
        """Raise if this is not a point for a collective operation such as an average or a checkpoint."""
        self.check_usable()
        if self.is_within_step:
            raise GossipError(
                f"rank {self.rank}: step {self.step} is in progress: {len(self._progress.stepped)} of "
                f"{len(self.updater.optimizers)} optimizers have been stepped; step the others first"
            )
        if self.is_in_join:
            raise self.refusal("inside join() the ranks are at different steps; leave the block first")

    def check_usable(self) -> None:
        """Raise if no step or average can be made now."""
        if self.is_parents:
            raise self.refusal(
                f"{forks.FORKED}. Here the model can be read, evaluated under torch.no_grad(), and closed"
            )
        self.check_alive()
        if (backward := self._progress.backward) is not None and not is_in_backward():
            backward.wait(_LETTING_GO)
            self.check_alive()
            if self._progress.backward is not None:
                raise self.refusal("a backward pass is running in another thread; wait until it has ended")
        if self.is_averaged:
            raise self.refusal("inside averaged() nothing can be trained or averaged; leave the block first")

    def leave_to_parent(self) -> None:
        """Implement :class:`gossip.communication.host.forks.Inherited`."""
        self.is_parents = True
        self._lock = threading.RLock()  # another thread may have held the old one

    def _recover_from_dead_backward(self) -> None:
        progress = self._progress
        if (backward := progress.backward) is None or backward.is_under_way:
            return
        with self._lock:
            if progress is not self._progress or progress.backward is not backward:
                return  # it ended normally, or another thread has handled it
            self._drop_dead_step()

    def _drop_dead_step(self) -> None:
        """Restart the step whose backward pass died."""
        progress = self._progress
        if progress.num_launched:
            with self.fatal():
                raise GossipError(f"rank {self.rank}: the backward pass of step {self.step} {DEAD_BACKWARD}")
        self._drop_shared_gradients()
        if progress.has_gradients:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter.grad = None
            logger.warning(
                f"rank {self.rank}: the backward pass of step {self.step} was ended by an exception before anything "
                "was updated or sent; its gradients are dropped"
            )
        self._progress = StepProgress(self.buckets)

    def _drop_shared_gradients(self) -> None:
        """Drop the gradients that were to be averaged over the ranks of a group, or raise if that has begun."""
        if not self.group.drop_gradients():
            with self.fatal():
                raise GossipError(
                    f"rank {self.rank}: the backward pass of step {self.step} was ended by an exception when some "
                    "gradients had been averaged over the ranks of its group and others had not, so this rank cannot "
                    "continue; start again from a checkpoint"
                )

    @contextlib.contextmanager
    def fatal(self) -> Iterator[None]:
        """End this model's training on an error inside the block, because the ranks are no longer in step."""
        try:
            yield
        except GenerationEndedError:
            raise
        except BaseException as error:
            self.error = error
            raise
