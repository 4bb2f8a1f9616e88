"""The engine that makes the steps of a model; its subclasses decide when."""

import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.algorithms import Algorithm
from gossip.errors import GossipError
from gossip.exchange.rank_exchanges import AnyBucket, RankExchanges
from gossip.exchange.transport import Transport
from gossip.measuring.step_stats import READ_BY_OTHERS, MemoryUse, Meter, memory_use
from gossip.optimizers.bucket_optimizer import Closure, OptimizerWatch, state_to_come
from gossip.parameters.buckets import make_buckets
from gossip.parameters.frozen_parameters import FrozenParameters
from gossip.parameters.parameter_slots import ParameterSlots
from gossip.private_torch import is_in_backward
from gossip.step.backward_pass import BackwardPass, GradientHooks, StepProgress, refuse_compiled_autograd, tensors_in
from gossip.step.forward_waits import ForwardWaits
from gossip.step.health_checks import HealthChecks
from gossip.step.local_update import Updater
from gossip.step.optimizer_step_calls import OptimizerStepCalls
from gossip.step.state.algorithm_state import algorithm_state, load_algorithm_state, regroup
from gossip.step.step_order import StepOrder
from topologies import Topology

#: After this number of consecutive steps with values that are not finite, training has failed permanently.
MAX_NON_FINITE_STEPS = 16


def do_nothing() -> None:
    """Do nothing."""


class StepEngine(HealthChecks, ABC):
    """Makes the steps of one model.

    A subclass determines when: bucket by bucket in backward passes, at their end, or in ``optimizer.step()``.
    """

    _updates_when_idle: ClassVar[bool] = True  # by gradients that ``no_sync`` accumulated

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[AnyBucket],
        frozen: FrozenParameters,
        exchanges: RankExchanges,
        updater: Updater,
        *,
        bucket_cap_bytes: int,
        watch: OptimizerWatch,
    ) -> None:
        super().__init__(buckets, updater)
        self.module = module
        self.frozen = frozen
        self.unfrozen: list[list[str]] = []  # names that have got buckets since the model was wrapped, by step
        self.exchanges = exchanges
        self._order = StepOrder(exchanges)
        self.synchronise = True  # else a backward pass makes no step, and only accumulates gradients
        self.put_back: Callable[[], object] = do_nothing  # puts this rank's own values in its place
        self.on_forward: Callable[[], None] = do_nothing  # not where a checkpoint recomputes
        self.on_step_begin: Callable[[], None] = do_nothing
        self.on_step_end: Callable[[], None] = do_nothing  # the number of steps has been incremented
        self.on_close: Callable[[], None] = do_nothing
        self._watch = watch
        self._bucket_cap_bytes = bucket_cap_bytes
        self._optimizer_steps = False  # while True, optimizer.step() is called by the engine
        self.last_meter: Meter | None = None  # of the newest step
        self.num_late = 0  # late messages that have been combined
        self._num_bad_steps = 0
        self._has_warned = self.rank != 0  # all ranks run the same loop
        self.optimizer_step_calls = OptimizerStepCalls(
            f"rank {self.rank}: ", "wrap the module with step_in_backward=False", tells=self.rank == 0
        )
        self._launching = threading.RLock()  # a module on several devices has a thread of autograd's for each
        self._forward_began = 0.0
        self._places = ParameterSlots(module, self.group.module)
        self._gradient_hooks = GradientHooks(self._make_hook)
        self._hook_parameters(buckets)
        self.forward_waits = self._make_forward_waits()

    # ------------------------------------------------------------------ around a forward pass

    def begin_forward(self) -> None:
        """Check that a step can be made, and detect a forward pass that a checkpoint recomputes in a backward pass."""
        refuse_compiled_autograd()
        self._forward_began = time.perf_counter()
        if not is_in_backward():
            self.check_alive()
            if self._progress.backward is not None:
                return  # another thread's backward pass is running, so this forward pass is not part of the training
            self.on_forward()
        elif self.synchronise:
            # The whole model is checkpointed: the backward pass about to start is an inner one; this one is the
            # outermost.
            self._queue_callback()
        self.check_places()
        if not is_in_backward():
            self._prepare_group()

    def _prepare_group(self) -> None:
        """Prepare the ranks with which this one holds a replica for a step."""
        if self.group.is_shared:
            with self.fatal():
                self.group.take_edits()
            self.combine_if_due()  # before anything is gathered
            with self.fatal():
                self.group.before_forward(self.step)

    def check_places(self) -> None:
        """Adopt parameters that were replaced in the module, or raise."""
        with self.fatal():
            self._places.check()

    def end_forward(self, output: Any) -> None:
        """Watch for the backward pass from ``output``, which is seen here before any inner (checkpointing) one."""
        self._progress.meter.forward_s += time.perf_counter() - self._forward_began
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_backward)

    def _on_backward(self, _: torch.Tensor) -> None:
        self._progress.is_unreduced |= not self.synchronise
        if self.error is None and self.synchronise:
            self._queue_callback()

    def _queue_callback(self) -> None:
        self._recover_from_dead_backward()
        if self._progress.backward is None and is_in_backward():  # others' gradients of an idle step come outside
            self._progress.backward = BackwardPass(self._on_backward_ended)

    # ------------------------------------------------------------------ inside a backward pass

    def on_shared_gradient(self) -> bool:
        """React to a gradient that becomes one of this rank's only together with those of other ranks.

        Returns whether the backward pass makes a step.
        """
        if not self.synchronise:
            self._progress.is_unreduced = True
            return False
        if self._progress.backward is None:
            self.check_usable()
        self._queue_callback()
        return True

    def refuse_late_gradient(self, index: int, name: str) -> NoReturn:
        """Raise because a parameter has got a gradient when its bucket had been updated, or its gradients averaged."""
        with self.fatal():
            raise GossipError(
                f"rank {self.rank}: step {self.step}, bucket {index}: parameter {name!r} received a gradient after its "
                "bucket had been updated. Of several backward passes in a step, put all but the last under no_sync(); "
                "inside a single pass, use checkpoint(..., use_reentrant=False)"
            )

    def _on_backward_ended(self) -> None:
        progress = self._progress
        progress.is_unreduced, backward = False, progress.backward
        with self.fatal():
            self._complete_gradients()
        if progress.has_gradients:
            self.end_step()
            self.optimizer_step_calls.count_step()
        else:
            progress.backward = None  # only the inputs' gradients, or not a step of this model
        if backward is not None:
            progress.meter.backward_s += backward.end()

    # ------------------------------------------------------------------ the step itself

    def idle_step(self) -> None:
        """Make the step of a rank that has nothing to backpropagate."""
        self._prepare_group()
        with self.fatal():
            self._complete_gradients(is_idle=True)
        with self.exchanges.updating(float(self._updates_when_idle and self._has_gradients())):
            self.end_step()

    def _complete_gradients(self, *, is_idle: bool = False) -> None:
        """Average the gradients that a backward pass has left unaveraged over the ranks that hold this replica."""
        self.group.complete_gradients(self.step, is_idle=is_idle)

    def end_step(self) -> None:
        """Make the step or its remaining part."""
        with self.fatal():
            self._begin_step()
            self._make_rest()
            self._finish_step()

    @abstractmethod
    def _make_rest(self) -> None:
        """Combine, update and send the buckets that have not been launched yet."""

    @abstractmethod
    def step_optimizer(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        """Do what ``optimizer.step()`` does, whoever calls it."""

    @abstractmethod
    def _make_hook(self, index: int, slot: int) -> Callable[[torch.Tensor], None]:
        """Return what is called with a parameter, in this slot of a bucket, that has got a gradient."""

    def _hook_parameters(self, buckets: Sequence[AnyBucket]) -> None:
        """Watch for the gradients of these buckets."""
        self._gradient_hooks.add(buckets)

    def _fire_step_hooks(self) -> None:
        """Call the hooks of the optimizers' ``step()``, if they have not been called."""

    def _begin_step(self) -> None:
        if not self._progress.has_begun:
            self._progress.has_begun = True
            self.exchanges.check_weighed()
            self._places.check_added()  # again, for loops that call the module directly
            self.updater.check_held()
            self._exchange_unfrozen()
            self.group.take_edits()
            self.on_step_begin()

    def _exchange_unfrozen(self) -> None:
        """Create buckets for the parameters that were unfrozen; all ranks do so in the same step, or raise."""
        names = self.frozen.unfrozen()
        if not names:
            return
        if self.is_in_join or self.exchanges.algorithm.is_asynchronous:
            where = "inside join()" if self.is_in_join else f"with algorithm {self.exchanges.algorithm.describe()}"
            raise self.refusal(
                f"parameter {names[0]!r} was unfrozen {where}, where the ranks are "
                f"at different steps and cannot start to exchange it together; unfreeze it before "
                f"{'the block' if self.is_in_join else 'the model is wrapped'}"
            )
        self.frozen.agree_to_unfreeze(names, self.step)
        self.unfreeze(names)

    def unfreeze(self, names: Sequence[str]) -> None:
        """Exchange those of these parameters that are still frozen. Local; on all ranks before the same step."""
        released = self.frozen.release(names)
        buckets = make_buckets(released, self._bucket_cap_bytes, first_index=len(self.buckets))
        if not buckets:
            return
        self.unfrozen.append([name for name, _ in released])
        self.buckets += buckets
        self.exchanges.add(buckets)
        self.updater.add(buckets)
        self._progress.awaited_gradients += [set(bucket.places) for bucket in buckets]
        self._hook_parameters(buckets)
        self.forward_waits.close()
        self.forward_waits = self._make_forward_waits()

    def _make_forward_waits(self) -> ForwardWaits:
        awaited = self.buckets if self.exchanges.algorithm.before_forward else ()
        return ForwardWaits(self.module, awaited, self._combine)

    @torch.no_grad()
    def _begin_all(self, *, looks_at_gradients: bool = True) -> None:
        """Combine what has arrived for all buckets."""
        for bucket in self.buckets:
            bucket.reclaim()
            if looks_at_gradients:  # otherwise they may be from an earlier backward pass
                self._check_was_combined(bucket)
        with self._lock:  # another thread's forward pass may be combining: wait for it
            self._order.begin(range(len(self.buckets)), self.step, self._progress.meter)

    def _direct_all(self) -> None:
        self._order.direct(range(len(self.buckets)), self.step)

    @torch.no_grad()
    def _end_all(self) -> None:
        """Send all buckets."""
        self._order.end(range(len(self.buckets)), self.step, self._progress.meter)
        for bucket in self.buckets:
            self.group.updated(bucket.index)

    def _check_was_combined(self, bucket: AnyBucket) -> None:
        if not self.exchanges.algorithm.before_forward or self.exchanges.in_flight[bucket.index] is None:
            return
        for name, parameter in zip(bucket.names, bucket.parameters, strict=False):
            if parameter.grad is not None:
                raise GossipError(
                    f"rank {self.rank}: step {self.step}, bucket {bucket.index}: parameter {name!r} was read before "
                    "its exchange was combined, by none of the modules that read it in the first forward pass; call "
                    "the model itself, or use algorithm='adapt_while_communicating'"
                )

    def _has_gradients(self) -> bool:
        """Return whether there are gradients that no step has applied. Local."""
        parameters = itertools.chain(self.module.parameters(), self.group.module.parameters())
        return any(parameter.grad is not None for parameter in parameters)

    @contextlib.contextmanager
    def _stepping_optimizers(self) -> Iterator[None]:
        self._optimizer_steps = True
        try:
            with self._watch.pause():
                yield
        finally:
            self._optimizer_steps = False

    def _finish_step(self) -> None:
        self.group.finish_step()
        progress = self._progress
        progress.meter.generation = self.generation
        self.last_meter = progress.meter
        self.num_late += progress.meter.num_late
        self.step += 1
        self._progress = StepProgress(self.buckets)
        self._fire_step_hooks()
        bad = progress.meter.num_refused + progress.meter.num_skipped
        self._num_bad_steps = self._num_bad_steps + 1 if bad else 0
        if self._num_bad_steps >= MAX_NON_FINITE_STEPS:
            raise GossipError(
                f"rank {self.rank}: step {self.step - 1}: in {self._num_bad_steps} consecutive steps gradients or "
                "messages were not finite; start again from a checkpoint, with a smaller learning rate"
            )
        self.on_step_end()

    # ------------------------------------------------------------------ between steps

    def memory(self, *, keeps_gradients: bool) -> MemoryUse:
        """Return what this rank holds between steps, now and in training; ``keeps_gradients``: these too."""
        exchanges, optimizers = self.exchanges, self.updater.optimizers
        read_by_others, messages = exchanges.to_come()
        parameters, kept = list(self.module.parameters()), exchanges.kept()
        whole, buffers = list(self.group.module.parameters()), list(self.group.module.buffers())
        trained = [each for each in parameters if each.requires_grad and keeps_gradients]
        return memory_use(
            sum(parameter.numel() for parameter in parameters),
            {
                "parameters": ([parameters, whole], [parameters, whole]),
                "buffers": (buffers, buffers),
                "gradients": (
                    [parameter.grad for parameter in parameters],
                    [torch.empty_like(parameter, device="meta") for parameter in trained],
                ),
                "state of the optimizer": ([each.state for each in optimizers], state_to_come(optimizers)),
                "state of the algorithm": (kept, kept),
                READ_BY_OTHERS: (exchanges.read_by_others(), read_by_others),
                "messages as sent, and what arrived": (exchanges.messages(), messages),
            },
            1 if exchanges.transport is None else exchanges.transport.num_buffers,
        )

    def weights(self) -> dict[str, float]:
        """Return how much this rank's values of each parameter count in a mean over ranks; equally if not named."""
        return {name: float(weight) for name, (weight,) in self.exchanges.weights().items()}

    def settle(self, *, closes: bool = False) -> None:
        """Combine what is in flight if the algorithm requires that before the parameters are read again.

        With ``closes`` also combine late messages, which will not arrive any more.
        """
        (self._places.restore if closes else self._places.check_all)()
        with self.fatal(), torch.no_grad():
            for bucket in self.buckets:
                bucket.reclaim()
            self.group.take_edits()
        self.combine_if_due()
        if closes:
            self.settle_late(closes=True)

    def settle_late(self, *, closes: bool = False) -> None:
        """Await and combine the messages that steps did not wait for. On all ranks after the same step."""
        with self.fatal(), torch.no_grad():
            self.exchanges.combine_late(self._progress.meter)
            if self.group.hears_late and not closes:
                self.group.changed()

    def note_reading(self) -> None:
        """Note that the parameters are about to be read, where backward passes make the updates and nothing clips."""
        self.optimizer_step_calls.note_reading(self.step, self._has_gradients)

    def combine_if_due(self) -> None:
        """Combine what is in flight, if the algorithm requires that before the parameters are read again."""
        if self.exchanges.algorithm.before_forward:
            self._combine(range(len(self.buckets)))

    def _combine(self, indices: Sequence[int]) -> None:
        if is_in_backward() or self.error is not None:
            return  # a checkpoint recomputes what was computed with the present values
        if (backward := self._progress.backward) is not None and backward.is_under_way:
            return  # in another thread: what it has already sent belongs to the next step
        with self._lock, self.fatal(), torch.inference_mode(False), torch.no_grad():
            due = [index for index in indices if self.exchanges.in_flight[index] is not None]
            for index in due:
                self.buckets[index].reclaim()
                self.exchanges.combine_(index, self._progress.meter)
            if due:
                self.group.changed()

    @torch.no_grad()
    def combine_all(self) -> None:
        """Combine what is in flight, between two steps, or where the backward pass of the first ends. Local."""
        with self.fatal(), self._lock:
            for bucket in self.buckets:
                bucket.reclaim()
                self.exchanges.combine_(bucket.index, self._progress.meter)
            self.group.changed()

    @torch.no_grad()
    def move(self, topology: Topology, transport: Transport | None, algorithm: Algorithm, rank: int) -> None:
        """Combine what is in flight, and continue with another topology and position among other ranks. Local."""
        self.combine_all()
        with self.fatal(), self._lock:
            self.exchanges.combine_late(self._progress.meter)
            self.exchanges.move(topology, transport, algorithm, rank)
            regroup(self.exchanges)
            self._order = StepOrder(self.exchanges)

    def drop_in_flight(self) -> None:
        """Await what is in flight and drop it."""
        with self.fatal():
            self.exchanges.drop()

    def state_dict(self) -> dict[str, Any]:
        """Return step and messages in flight, awaited but not applied; training then continues unchanged."""
        self.settle()
        self.settle_late()
        with self.fatal():
            self.exchanges.arrive()
            overflow = None if self.updater.scaler is None else self.updater.scaler.flag.wait()
        return {
            "step": self.step,
            "overflow": overflow,
            "exchanges": self.exchanges.state_dict(),
            "algorithm": algorithm_state(self.exchanges),
            "samples": self.exchanges.samples,
            "frozen": self.frozen.state_dict(),
            "measured": self._progress.meter.state_dict(),
            "num_bad_steps": self._num_bad_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore a step and its messages in flight, if "exchanges" is present; return what was left out, in words."""
        with self.fatal():
            self.exchanges.load_state_dict(state.get("exchanges"))
        self.frozen.load_state_dict(state.get("frozen"))
        self.step = state["step"]
        self.on_step_end()
        self._num_bad_steps = state.get("num_bad_steps", 0)
        self._progress.meter.load_state_dict(state.get("measured", {}))
        if self.updater.scaler is not None:
            self.updater.scaler.flag.restore(state.get("overflow"))
        self.exchanges.weigh(state.get("samples"))
        return load_algorithm_state(self.exchanges, state.get("algorithm"))

    def close(self) -> None:
        """Remove the hooks; the model can no longer be trained. Local."""
        self._gradient_hooks.close()
        self.forward_waits.close()
        self._places.close()
        self._watch.close()
        self.frozen.close()
        for bucket in self.buckets:
            bucket.release()
        self.exchanges.in_flight = [None] * len(self.buckets)
        self.error = self.error or GossipError("this GossipDataParallel has been closed")
        self.on_close()
