"""When a step is made: from inside backward passes, or when the optimizer is stepped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer

from gossip.errors import GossipError
from gossip.measuring.step_stats import Meter, StepStats
from gossip.optimizers.bucket_optimizer import fire_step_hooks
from gossip.optimizers.closures import Closure, EvaluatedClosure, requires_closure
from gossip.optimizers.foreign_optimizers import OptimizerWatch
from gossip.parameters.buckets import make_buckets
from gossip.parameters.frozen_parameters import FrozenParameters
from gossip.parameters.parameter_slots import ParameterSlots
from gossip.step.await_points import AwaitPoints, refuse_if_read
from gossip.step.backward_pass import (
    TWO_MODELS,
    BackwardPass,
    BackwardRange,
    refuse_compiled_autograd,
    steps_another_model,
    tensors_in,
)
from gossip.step.gradient_hooks import GradientHooks
from gossip.step.liveness import Liveness
from gossip.step.mixing import AnyBucket, Mixer
from gossip.step.owner_calls import OwnerCalls
from gossip.step.step_progress import StepProgress
from gossip.step.updating import Updater

#: So many steps in a row with values that are not finite, and the training has gone wrong for good.
MAX_NON_FINITE_STEPS = 16


class StepEngine(Liveness):
    """Makes the steps of one model.

    Parameters
    ----------
    module : Module
    buckets : sequence of Bucket or BufferBucket
    frozen : FrozenParameters
        All parameters that are in no bucket.
    mixer : Mixer
    updater : Updater
    rank : int
    watch : OptimizerWatch
    step_in_backward : bool
        Whether backward passes make steps, or calls of the optimizers' ``step()``.
    bucket_cap_bytes : int
        What a bucket of parameters that are unfrozen later may hold.

    Attributes
    ----------
    unfrozen : list of list of str
        Names of the parameters that got buckets since the model was wrapped, those of one step together.
    step : int
        Number of steps made; also the index of the next round.
    synchronise : bool
        Whether a backward pass makes a step, or accumulates gradients only.
    is_averaged : bool
        Whether the buckets hold the global average for a while.
    on_step_begin : callable or None
        Called once at the beginning of every step.
    error : BaseException or None
        What ended the training on this rank: the ranks are no longer in step.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[AnyBucket],
        frozen: FrozenParameters,
        mixer: Mixer,
        updater: Updater,
        *,
        rank: int,
        step_in_backward: bool,
        bucket_cap_bytes: int,
        watch: OptimizerWatch,
    ) -> None:
        self.module = module
        self.buckets = list(buckets)
        self.frozen = frozen
        self.unfrozen: list[list[str]] = []
        self.mixer = mixer
        self.updater = updater
        self.rank = rank
        self.step = 0
        self.synchronise = True
        self.is_averaged = False
        self.on_step_begin: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self._watch = watch
        self._bucket_cap_bytes = bucket_cap_bytes
        self._steps_in_backward = step_in_backward
        self._by_bucket = step_in_backward and not updater.needs_all_gradients
        self._optimizer_steps = False  # within it, optimizer.step() is ours
        self._progress = StepProgress(buckets)
        self._last_meter: Meter | None = None
        self._num_bad_steps = 0
        self._has_warned = False
        self._owner_calls = OwnerCalls(rank)
        self._backward_range = BackwardRange()
        self._lock = threading.RLock()  # held against forward passes in other threads
        self._forward_began = self._backward_began = 0.0
        self._places = ParameterSlots(module)
        self._gradient_hooks = GradientHooks(self._make_hook)
        self._hook_parameters(buckets)
        self._await_points = self._make_await_points()

    # ------------------------------------------------------------------ around a forward pass

    def begin_forward(self) -> None:
        """Check that a step can be made; notice a forward pass that is a checkpoint's, inside a backward pass."""
        refuse_compiled_autograd()
        self._forward_began = time.perf_counter()
        if torch._C._current_graph_task_id() == -1:
            self.check_alive()
            if self._progress.backward is not None:
                return  # another thread's backward pass is under way: this forward pass is no part of the training
        elif self.synchronise:
            # The whole model is checkpointed: the backward pass about to run is an inner one, this is the outermost.
            self._queue_callback()
        self.check_places()
        if self._steps_in_backward:
            self.frozen.hook(self._on_unfrozen_gradient)

    def check_places(self) -> None:
        """Take over parameters that were replaced in the module, or raise."""
        with self.fatal():
            self._places.check()

    def watched(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """What calls the module: the first forward pass that trains shows who reads which parameters."""
        return self._await_points.watched(module)

    def end_forward(self, output: Any) -> None:
        """Watch for the backward pass from ``output``: it is seen here before any inner (checkpointing) one begins."""
        self._progress.meter.forward_s += time.perf_counter() - self._forward_began
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_backward)

    def _on_backward(self, _: torch.Tensor) -> None:
        if self.error is None and self.synchronise:
            self._queue_callback()

    def _queue_callback(self) -> None:
        self._recover_from_dead_backward()
        if self._progress.backward is None:
            self._progress.backward = BackwardPass(self._on_backward_ended)
            self._backward_began = time.perf_counter()
            self._backward_range.begin()

    # ------------------------------------------------------------------ inside a backward pass

    def _hook_parameters(self, buckets: Sequence[AnyBucket]) -> None:
        if self._steps_in_backward:
            self._gradient_hooks.add(buckets)

    def _on_unfrozen_gradient(self, parameter: torch.Tensor) -> None:
        """Its bucket is made when the step begins; it may be the only one that has a gradient."""
        if self.synchronise and not self._progress.has_gradients:
            self._on_first_gradient(parameter)

    def _make_hook(self, index: int, place: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            progress = self._progress
            if progress.is_counting and self.synchronise:
                awaited = progress.awaited_gradients[index]
                if len(awaited) > 1 and place in awaited:  # as nearly always, and called once per parameter and step
                    awaited.remove(place)
                    return
            on_first_or_last_gradient(parameter)

        def on_first_or_last_gradient(parameter: torch.Tensor) -> None:
            if not self.synchronise:
                return
            if not self._progress.has_gradients:
                self._on_first_gradient(parameter)
            progress = self._progress
            if progress.may_release:
                self._launch_ready()
            if progress.num_launched > index:
                self._refuse_late_gradient(index, place)
            awaited = progress.awaited_gradients[index]
            awaited.discard(place)
            if not awaited and index == progress.num_launched and self._by_bucket:
                if self._gradient_hooks.are_followed(parameter, index, place):
                    progress.withhold()  # as they shall find the gradient too; launched with the next one or at the end
                else:
                    self._launch_ready()

        return on_gradient

    def _on_first_gradient(self, parameter: torch.Tensor) -> None:
        if self.is_averaged:
            parameter.grad = None
        self.check_usable()
        self._queue_callback()
        self._progress.count_gradients()
        if not self._has_warned and steps_another_model(self):
            self._has_warned = True
            logger.warning("rank {}: step {}: {}", self.rank, self.step, TWO_MODELS)

    def _refuse_late_gradient(self, index: int, place: int) -> None:
        with self.fatal():
            raise GossipError(
                f"rank {self.rank}: step {self.step}, bucket {index}: parameter {self.buckets[index].names[place]!r} "
                "got a gradient after its bucket had been updated. Of several backward passes in a step, put all but "
                "the last under no_sync(); inside one, checkpoint with use_reentrant=False"
            )

    def _launch_ready(self) -> None:
        with self.fatal():
            progress = self._progress
            progress.count_gradients()
            while progress.num_launched < len(self.buckets):
                if progress.awaited_gradients[progress.num_launched]:
                    break
                if not self.buckets[progress.num_launched].parameters:
                    break  # buffers: the backward pass may still write them
                self._launch_next()

    def _on_backward_ended(self) -> None:
        progress = self._progress
        if progress.has_gradients:
            self.end_step()
            self._owner_calls.count_step()
        else:
            progress.backward = None  # the inputs' gradients only, or not ours to step
        progress.meter.backward_s += time.perf_counter() - self._backward_began
        self._backward_range.end()

    # ------------------------------------------------------------------ the step itself

    def end_step(self) -> None:
        """Make the step, or what is left of it: buckets that wait for gradients which did not come are launched."""
        with self.fatal():
            self._begin_step()
            if self._by_bucket:
                while self._progress.num_launched < len(self.buckets):
                    self._launch_next()
            elif self._steps_in_backward:
                self._combine_for_step()
                with self._stepping_optimizers():
                    self.updater.update_all(self.step, self._progress.meter)
                self._send_all()
            else:  # an idle step
                if self._progress.stepped:
                    raise GossipError(
                        f"rank {self.rank}: step {self.step}: idle_step() after one of several optimizers was stepped; "
                        "step all of them, or none"
                    )
                self._combine_for_step(looks_at_gradients=False)
                self.updater.idle()
                self._send_all()
            self._finish_step()

    def step_optimizer(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        """What ``optimizer.step()`` does, whoever calls it."""
        if not self._steps_in_backward:
            return self._step_outside(optimizer, closure)
        if self._optimizer_steps:
            return fire_step_hooks(optimizer) if self._by_bucket else type(optimizer).step(optimizer)
        self._owner_calls.note(optimizer, closure, self.step)
        return None  # the update has been made

    def _step_outside(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        self.check_usable()
        if closure is not None and not requires_closure(optimizer):
            closure = EvaluatedClosure(optimizer, closure)
            self.check_usable()
        with self.fatal():
            progress = self._progress
            if any(each is optimizer for each in progress.stepped):
                raise GossipError(
                    f"rank {self.rank}: step {self.step}: {type(optimizer).__name__}.step() was called twice, but not "
                    "every optimizer once; all optimizers of a model make one step together: step each of them once, "
                    "or wrap the parts of the model apart"
                )
            if not progress.stepped:
                self._begin_step()
                self.check_places()
                self._combine_for_step(looks_at_gradients=closure is None or isinstance(closure, EvaluatedClosure))
            with self._stepping_optimizers():
                result = self.updater.update_by(optimizer, closure, self.step, progress.meter)
            progress.stepped.append(optimizer)
            if len(progress.stepped) == len(self.updater.optimizers):
                self.updater.settle_scale()
                self._send_all()
                self._finish_step()
            return result

    def _begin_step(self) -> None:
        if not self._progress.has_begun:
            self._progress.has_begun = True
            self._places.check_added()  # again, for loops that call the module past the model
            self.updater.check_held()
            self._exchange_unfrozen()
            if self.on_step_begin is not None:
                self.on_step_begin()

    def _exchange_unfrozen(self) -> None:
        """Give buckets to the parameters that were unfrozen; all ranks do so in the same step, or raise."""
        names = self.frozen.unfrozen()
        if not names:
            return
        if self.on_step_begin is not None:
            raise GossipError(
                f"rank {self.rank}: step {self.step}: parameter {names[0]!r} was unfrozen inside join(), where the "
                "ranks are at different steps and cannot begin to exchange it together; unfreeze before the block"
            )
        self.frozen.agree_to_unfreeze(names, self.step)
        self.unfreeze(names)

    def unfreeze(self, names: Sequence[str]) -> None:
        """Exchange those of these parameters that are still frozen. Local, on all ranks before the same step."""
        released = self.frozen.release(names)
        buckets = make_buckets(released, self._bucket_cap_bytes, first_index=len(self.buckets))
        if not buckets:
            return
        self.unfrozen.append([name for name, _ in released])
        self.buckets += buckets
        self.mixer.add(buckets)
        self.updater.add(buckets)
        self._progress.awaited_gradients += [set(bucket.places) for bucket in buckets]
        self._hook_parameters(buckets)
        self._await_points.close()
        self._await_points = self._make_await_points()

    def _make_await_points(self) -> AwaitPoints:
        awaited = self.buckets if self.mixer.algorithm.combines_before_forward else ()
        return AwaitPoints(self.module, awaited, self._combine)

    @torch.no_grad()
    def _launch_next(self) -> None:
        """Mix what has arrived for the next bucket, update it, send it."""
        progress = self._progress
        bucket = self.buckets[progress.num_launched]
        if progress.num_launched == 0:
            self._begin_step()
        progress.num_launched += 1
        bucket.reclaim()
        self._check_was_combined(bucket)
        norm = self.updater.measure_bucket(bucket, self.step, progress.meter)  # while messages may still be under way
        self._mix(bucket)
        with self._watch.pause():
            self.updater.update_bucket(bucket, norm, progress.meter)
        self.mixer.send(bucket, self.step, progress.meter)

    @torch.no_grad()
    def _combine_for_step(self, *, looks_at_gradients: bool = True) -> None:
        for bucket in self.buckets:
            bucket.reclaim()
            if looks_at_gradients:  # else they may be an older backward pass's
                self._check_was_combined(bucket)
            self._mix(bucket)

    @torch.no_grad()
    def _send_all(self) -> None:
        for bucket in self.buckets:
            self.mixer.send(bucket, self.step, self._progress.meter)

    def _check_was_combined(self, bucket: AnyBucket) -> None:
        if self.mixer.algorithm.combines_before_forward and self.mixer.in_flight[bucket.index] is not None:
            refuse_if_read(bucket, f"rank {self.rank}: step {self.step}, bucket {bucket.index}")

    def _mix(self, bucket: AnyBucket) -> None:
        with self._lock:  # another thread's forward pass may be at it: wait until it is done
            self.mixer.combine_(bucket, self._progress.meter)

    @contextlib.contextmanager
    def _stepping_optimizers(self) -> Iterator[None]:
        self._optimizer_steps = True
        try:
            with self._watch.pause():
                yield
        finally:
            self._optimizer_steps = False

    def _finish_step(self) -> None:
        progress = self._progress
        self._last_meter = progress.meter
        self.step += 1
        self._progress = StepProgress(self.buckets)
        if self._by_bucket:
            with self._stepping_optimizers():
                for optimizer in self.updater.optimizers:
                    optimizer.step()
        bad = progress.meter.num_refused + progress.meter.num_skipped
        self._num_bad_steps = self._num_bad_steps + 1 if bad else 0
        if self._num_bad_steps >= MAX_NON_FINITE_STEPS:
            raise GossipError(
                f"rank {self.rank}: step {self.step - 1}: in {self._num_bad_steps} steps in a row gradients or "
                "messages were not finite; start again from a checkpoint, with a smaller learning rate"
            )

    # ------------------------------------------------------------------ between steps

    def stats(self) -> StepStats | None:
        """What the newest step cost; None before the first. Waits for the device."""
        return None if self._last_meter is None else self._last_meter.stats(self.step - 1)

    def gradient_norm(self) -> float | None:
        """Of the newest step, before clipping. Waits for the device."""
        return None if self._last_meter is None else self._last_meter.gradient_norm()

    def settle(self, *, closes: bool = False) -> None:
        """Combine what is in flight if the algorithm wants it before the parameters are read again."""
        (self._places.restore if closes else self._places.check_all)()
        with self.fatal(), torch.no_grad():
            for bucket in self.buckets:
                bucket.reclaim()
        self.combine_if_due()

    def combine_if_due(self) -> None:
        """Combine what is in flight, if the algorithm wants it before the parameters are read again."""
        if self.mixer.algorithm.combines_before_forward:
            self._combine(range(len(self.buckets)))

    def _combine(self, indices: Sequence[int]) -> None:
        if torch._C._current_graph_task_id() != -1 or self.error is not None:
            return  # a checkpoint computes again what was computed with the values as they are
        if (backward := self._progress.backward) is not None and backward.is_under_way:
            return  # in another thread: what it has sent already belongs to the next step
        with self._lock:
            for index in indices:
                if self.mixer.in_flight[index] is not None:
                    with self.fatal(), torch.inference_mode(False), torch.no_grad():
                        self.buckets[index].reclaim()
                        self._mix(self.buckets[index])

    def drop_in_flight(self) -> None:
        """Wait for what is in flight and forget it."""
        with self.fatal():
            self.mixer.drop()

    def state_dict(self) -> dict[str, Any]:
        """Step and what is in flight, awaited but not applied; training goes on as if nobody had looked."""
        self.settle()
        with self.fatal():
            return {
                "step": self.step,
                "overflow": None if self.updater.scaler is None else self.updater.scaler.flag.wait(),
                "mixer": self.mixer.state_dict(),
                "frozen": self.frozen.state_dict(),
                "measured": self._progress.meter.state_dict(),
                "num_bad_steps": self._num_bad_steps,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a step and what was in flight then (no "mixer": nothing)."""
        with self.fatal():
            self.mixer.load_state_dict(state.get("mixer"))
        self.frozen.load_state_dict(state.get("frozen"))
        self.step = state["step"]
        self._num_bad_steps = state.get("num_bad_steps", 0)
        self._progress.meter.load_state_dict(state.get("measured", {}))
        if self.updater.scaler is not None:
            self.updater.scaler.flag.restore(state.get("overflow"))

    def close(self) -> None:
        """Remove the hooks; nothing can be trained any more. Local."""
        self._gradient_hooks.close()
        self._await_points.close()
        self._places.close()
        self._watch.close()
        self.frozen.close()
        for bucket in self.buckets:
            bucket.release()
        self.mixer.in_flight = [None] * len(self.buckets)
        self.error = self.error or GossipError("this GossipDataParallel has been closed")
