"""When a step is made: from inside backward passes, or when the optimizer is stepped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from loguru import logger
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gossip.bucket_optimizer import fire_step_hooks
from gossip.errors import GossipError
from gossip.mixing import AnyBucket, Mixer
from gossip.places import ParameterPlaces
from gossip.stats import Meter, StepStats
from gossip.updating import Updater
from gossip.users import AwaitHook, UserRecorder, Users, place_await_hooks

#: So many steps in a row with values that are not finite, and the training has gone wrong for good.
MAX_NON_FINITE_STEPS = 16


class _StepProgress:
    """How far the step that is being made has come."""

    def __init__(self, buckets: Sequence[AnyBucket]) -> None:
        self.awaited_gradients = [set(range(len(bucket.parameters))) for bucket in buckets]  # by place
        self.num_launched = 0  # buckets launch in index order, the same on every rank
        self.callback_is_queued = False  # at the end of the backward pass
        self.has_gradients = False
        self.has_begun = False
        self.stepped: list[Optimizer] = []  # by their owner, in this step
        self.meter = Meter()


class StepEngine:
    """Makes the steps of one model.

    Parameters
    ----------
    module : Module
    buckets : sequence of Bucket or BufferBucket
    mixer : Mixer
    updater : Updater
    rank : int
    step_in_backward : bool
        Whether backward passes make steps, or calls of the optimizers' ``step()``.

    Attributes
    ----------
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
        mixer: Mixer,
        updater: Updater,
        *,
        rank: int,
        step_in_backward: bool,
    ) -> None:
        self.module = module
        self.buckets = buckets
        self.mixer = mixer
        self.updater = updater
        self.rank = rank
        self.step = 0
        self.synchronise = True
        self.is_averaged = False
        self.on_step_begin: Callable[[], None] | None = None
        self.error: BaseException | None = None
        self._steps_in_backward = step_in_backward
        self._by_bucket = step_in_backward and not updater.needs_all_gradients
        self._optimizer_steps = False  # within it, optimizer.step() is ours
        self._progress = _StepProgress(buckets)
        self._last_meter: Meter | None = None
        self._num_bad_steps = 0
        self._forward_began = self._backward_began = 0.0
        self._places = ParameterPlaces(module)
        self._hooks: list[RemovableHandle] = []
        self._await_hooks: list[RemovableHandle] = []
        self._without_hook = (
            [(bucket, place) for bucket in buckets for place in range(len(bucket.parameters))]
            if step_in_backward
            else []
        )
        self._hook_parameters()
        self._users_are_known = not mixer.algorithm.combines_before_forward
        if not self._users_are_known:
            everything = [bucket.index for bucket in buckets]
            hook = module.register_state_dict_pre_hook(AwaitHook(self._combine, everything))
            self._hooks.append(hook)
            self._place_await_hooks(None)

    # ------------------------------------------------------------------ around a forward pass

    def begin_forward(self) -> None:
        """Check that a step can be made; notice a forward pass that is a checkpoint's, inside a backward pass."""
        if torch._C._current_graph_task_id() == -1:
            self.check_alive()
        elif self.synchronise:
            # The whole model is checkpointed: the backward pass about to run is an inner one, this is the outermost.
            self._queue_callback()
        self.check_places()
        if self._without_hook:
            self._hook_parameters()
        self._forward_began = time.perf_counter()

    def check_places(self) -> None:
        """Take over parameters that were replaced in the module, or raise."""
        with self.fatal():
            self._places.check()

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Around the forward pass itself: the first one that trains shows who reads which parameters."""
        if self._users_are_known or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return contextlib.nullcontext()
        return self._record_users()

    @contextlib.contextmanager
    def _record_users(self) -> Iterator[None]:
        self._users_are_known = True
        if any(
            isinstance(each, torch._dynamo.OptimizedModule) or each._compiled_call_impl is not None
            for each in self.module.modules()
        ):
            yield  # what is compiled cannot be watched: everything is awaited before the module runs
            return
        recorder = UserRecorder()
        with recorder.watch(self.module):
            yield
        self._place_await_hooks(recorder.users)

    def _place_await_hooks(self, users: Users | None) -> None:
        for handle in self._await_hooks:
            handle.remove()
        self._await_hooks = place_await_hooks(self.module, self.buckets, users, self._combine)

    def end_forward(self, output: Any) -> None:
        """Watch for the backward pass from ``output``: it is seen here before any inner (checkpointing) one begins."""
        self._progress.meter.forward_s += time.perf_counter() - self._forward_began
        if torch.is_grad_enabled():
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._on_backward)

    def _on_backward(self, _: torch.Tensor) -> None:
        if self.error is None and self.synchronise:
            self._queue_callback()

    def _queue_callback(self) -> None:
        if not self._progress.callback_is_queued:
            self._progress.callback_is_queued = True
            self._backward_began = time.perf_counter()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_ended)

    # ------------------------------------------------------------------ inside a backward pass

    def _hook_parameters(self) -> None:
        """Give a hook to every parameter that requires a gradient by now."""
        still_without = []
        for bucket, place in self._without_hook:
            parameter = bucket.parameters[place]
            if parameter.requires_grad:
                hook = self._make_hook(bucket.index, place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            else:
                still_without.append((bucket, place))
        self._without_hook = still_without

    def _make_hook(self, index: int, place: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            progress = self._progress
            if progress.has_gradients and self.synchronise:
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
            if progress.num_launched > index:
                self._refuse_late_gradient(index, place)
            awaited = progress.awaited_gradients[index]
            awaited.discard(place)
            if not awaited and index == progress.num_launched and self._by_bucket:
                self._launch_ready()

        return on_gradient

    def _on_first_gradient(self, parameter: torch.Tensor) -> None:
        if self.is_averaged:
            parameter.grad = None
        self.check_usable()
        self._queue_callback()
        self._progress.has_gradients = True

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
        else:
            progress.callback_is_queued = False  # the inputs' gradients only, or not ours to step
        progress.meter.backward_s += time.perf_counter() - self._backward_began

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
                self._combine_for_step()
                self.updater.idle()
                self._send_all()
            self._finish_step()

    def step_optimizer(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
        """What ``optimizer.step()`` does, whoever calls it."""
        if not self._steps_in_backward:
            return self._step_outside(optimizer, closure)
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) cannot work here: the update has been made inside backward; call it without, "
                "or wrap the module with step_in_backward=False"
            )
        if not self._optimizer_steps:
            return None  # the update has been made
        if self._by_bucket:
            return fire_step_hooks(optimizer)
        return type(optimizer).step(optimizer)

    def _step_outside(self, optimizer: Optimizer, closure: Callable[[], float] | None) -> Any:
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
                self._combine_for_step()
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
            if self.on_step_begin is not None:
                self.on_step_begin()

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
        self.mixer.combine_(bucket, progress.meter)
        self.updater.update_bucket(bucket, self.step, progress.meter)
        self.mixer.send(bucket, self.step, progress.meter)

    @torch.no_grad()
    def _combine_for_step(self) -> None:
        for bucket in self.buckets:
            bucket.reclaim()
            self._check_was_combined(bucket)
            self.mixer.combine_(bucket, self._progress.meter)

    @torch.no_grad()
    def _send_all(self) -> None:
        for bucket in self.buckets:
            self.mixer.send(bucket, self.step, self._progress.meter)

    def _check_was_combined(self, bucket: AnyBucket) -> None:
        if not self.mixer.algorithm.combines_before_forward or self.mixer.in_flight[bucket.index] is None:
            return
        for name, parameter in zip(bucket.names, bucket.parameters, strict=False):
            if parameter.grad is not None:
                raise GossipError(
                    f"rank {self.rank}: step {self.step}, bucket {bucket.index}: parameter {name!r} was read before "
                    "its exchange was combined, by none of the modules that read it in the first forward pass; call "
                    "the model itself, or use algorithm='adapt_while_communicating'"
                )

    @contextlib.contextmanager
    def _stepping_optimizers(self) -> Iterator[None]:
        self._optimizer_steps = True
        try:
            yield
        finally:
            self._optimizer_steps = False

    def _finish_step(self) -> None:
        progress = self._progress
        self._last_meter = progress.meter
        self.step += 1
        self._progress = _StepProgress(self.buckets)
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

    def settle(self) -> None:
        """Combine what is in flight if the algorithm wants it before the parameters are read again."""
        self._places.check_all()
        with self.fatal(), torch.no_grad():
            for bucket in self.buckets:
                bucket.reclaim()
        if self.mixer.algorithm.combines_before_forward:
            self._combine(range(len(self.buckets)))

    def _combine(self, indices: Sequence[int]) -> None:
        if torch._C._current_graph_task_id() != -1 or self.error is not None:
            return  # a checkpoint computes again what was computed with the values as they are
        for index in indices:
            if self.mixer.in_flight[index] is not None:
                with self.fatal(), torch.inference_mode(False), torch.no_grad():
                    self.buckets[index].reclaim()
                    self.mixer.combine_(self.buckets[index], self._progress.meter)

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
                "in_flight": self.mixer.state_dict(),
                "measured": self._progress.meter.state_dict(),
                "num_bad_steps": self._num_bad_steps,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a step and what was in flight then (None: nothing)."""
        with self.fatal():
            self.mixer.load_state_dict(state["in_flight"])
        self.step = state["step"]
        self._num_bad_steps = state.get("num_bad_steps", 0)
        self._progress.meter.load_state_dict(state.get("measured", {}))
        if self.updater.scaler is not None:
            self.updater.scaler.flag.restore(state.get("overflow"))

    def check_alive(self) -> None:
        """Raise if this rank cannot go on: after an error, or after a backward pass that died half-way."""
        if self.error is not None:
            raise GossipError(
                f"rank {self.rank}: no training or averaging after: {str(self.error) or repr(self.error)}"
            ) from self.error
        if self._progress.callback_is_queued and torch._C._current_graph_task_id() == -1:
            self._recover_from_dead_backward()

    def check_usable(self) -> None:
        """Raise if no step or average can be made now."""
        self.check_alive()
        if self.is_averaged:
            raise GossipError(
                f"rank {self.rank}: step {self.step}: inside averaged() nothing can be trained or averaged; "
                "leave the block first"
            )

    def _recover_from_dead_backward(self) -> None:
        if not self._steps_in_backward:
            self._progress.callback_is_queued = False
            return
        if self._progress.num_launched:
            with self.fatal():
                raise GossipError(
                    f"rank {self.rank}: the backward pass of step {self.step} was ended by an exception; some buckets "
                    "were updated and sent and others not: this rank cannot go on, start again from a checkpoint"
                )
        if self._progress.has_gradients:
            for bucket in self.buckets:
                for parameter in bucket.parameters:
                    parameter.grad = None
            logger.warning(
                "rank {}: the backward pass of step {} was ended by an exception before anything was updated or sent; "
                "its gradients are dropped",
                self.rank,
                self.step,
            )
        self._progress = _StepProgress(self.buckets)

    @contextlib.contextmanager
    def fatal(self) -> Iterator[None]:
        """An error inside the block ends this model's training: the ranks are no longer in step."""
        try:
            yield
        except BaseException as error:
            self.error = error
            raise

    def close(self) -> None:
        """Remove the hooks; nothing can be trained any more. Local."""
        for handle in (*self._hooks, *self._await_hooks):
            handle.remove()
        self._hooks.clear()
        self._await_hooks.clear()
        self._places.close()
        self.mixer.in_flight = [None] * len(self.buckets)
        self.error = self.error or GossipError("this GossipDataParallel has been closed")


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers, dataclasses and objects that have some as attributes."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, torch.Tensor))
