"""The user's torch optimizers, stepped by the engine, all at once or bucket by bucket.

Closures of ``optimizer.step(closure)`` are evaluated before messages in flight are mixed in. Foreign
optimizers that step a wrapped model's parameters are detected.
"""

import collections
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossip import private_torch
from gossip.errors import GossipError
from gossip.parameters.names import named_parameters

Closure = Callable[[], Any]
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer | Sequence[Optimizer]]
OptimizerArgument = Optimizer | Sequence[Optimizer] | OptimizerFactory | None


def build_optimizers(
    optimizer: OptimizerArgument, module: nn.Module, *, in_backward: bool, by_bucket: bool
) -> tuple[Optimizer, ...]:
    """Return the given optimizers, or those that the factory makes over all named parameters."""
    if optimizer is None:
        return ()
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        optimizer = optimizer(list(named_parameters(module)))
    optimizers: tuple[Any, ...] = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    for single in optimizers:
        if not isinstance(single, Optimizer):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, several in a tuple, or a factory of them such as "
                f"functools.partial(torch.optim.SGD, lr=0.1), got {type(single).__name__}"
            )
        if in_backward and requires_closure(single):
            raise ValueError(
                f"{type(single).__name__} evaluates a closure several times per step, which cannot run inside "
                "backward; wrap the module with step_in_backward=False, or choose an optimizer that only needs "
                "gradients"
            )
        if by_bucket:
            _check_steps_by_bucket(single)
    check_parameters_held(optimizers, dict(named_parameters(module)))
    return optimizers


def _check_steps_by_bucket(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    for key, value in vars(optimizer).items():
        held = () if key in ("state", "param_groups") else private_torch.tree_leaves(value)
        if any(isinstance(leaf, Optimizer | nn.Parameter) for leaf in held):
            raise ValueError(
                f"{name} keeps parameters or another optimizer in its attribute {key!r}, and would step all of them "
                "for every bucket; wrap the module with step_in_backward=False"
            )
    if private_torch.step_pre_hooks(optimizer):
        raise ValueError(f"{name} has step pre-hooks; {_NO_PRE_HOOKS}")


_NO_PRE_HOOKS = (
    "the first buckets are updated before all gradients are computed, so they would see nothing; wrap the "
    "module with step_in_backward=False"
)


def held_by(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters in the optimizers' groups, in their order."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


def check_parameters_held(optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer with a parameter that is not one of ``parameters``, or that another optimizer holds too."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    holder: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in held_by([optimizer]):
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer {type(optimizer).__name__} holds a parameter of shape {list(parameter.shape)} that "
                    "the module does not have; build it over the parameters of the module that is wrapped"
                )
            if holder.setdefault(id(parameter), optimizer) is not optimizer:
                raise ValueError(
                    f"parameter {names[id(parameter)]!r} is held by two optimizers; give it to one of them"
                )


def view_of(optimizer: Optimizer) -> Any:
    """Return an optimizer with the same attributes, which can be given other groups and another state."""
    # Not copy.copy, which calls __getstate__ and keeps only what a checkpoint needs.
    view: Any = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__)
    for name in _REPLACED:
        view.__dict__.pop(name, None)
    private_torch.without_step_hooks(view.__dict__)
    return view


def step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the ``step()`` of its class without torch's profiling and hooks, which must run once per step."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


class BucketOptimizer:
    """The algorithm of an optimizer, restricted to some of its parameters.

    It shares the optimizer's state and reads its ``param_groups`` at every step, so that a scheduler, a logger or a
    state_dict sees a single optimizer. Groups may be added at any time.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._mine = {id(parameter) for parameter in parameters}
        self._groups_seen: list[tuple[int, int]] = []
        self._members: list[list[nn.Parameter]] = []
        self._view, self._step = view_of(optimizer), step_of(optimizer)
        self._is_checked = False

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        groups = self._optimizer.param_groups
        seen = [(id(group["params"]), len(group["params"])) for group in groups]
        if seen != self._groups_seen:
            self._groups_seen = seen
            self._members = [[p for p in group["params"] if id(p) in self._mine] for group in groups]
        own_groups = [{**group, "params": own} for group, own in zip(groups, self._members, strict=True) if own]
        if not own_groups:
            return
        self._view.state = self._optimizer.state
        self._view.param_groups = own_groups
        before = None if self._is_checked else (self._own_attributes(), [dict(group) for group in own_groups])
        self._step(self._view)
        if before is not None:
            self._check_state_is_per_parameter(*before)

    def _own_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._view).items() if name not in NOT_COUNTED}

    def _check_state_is_per_parameter(self, attributes: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Refuse an optimizer that counts in its groups or in itself, because each bucket would count separately."""
        self._is_checked = True
        pairs = [(self._own_attributes(), attributes), *zip(self._view.param_groups, groups, strict=True)]
        for after, before in pairs:
            if changed := [name for name in after if name not in before or after[name] is not before[name]]:
                raise GossipError(
                    f"{type(self._optimizer).__name__} keeps {changed[0]!r} for several parameters at once, "
                    "which cannot be stepped bucket by bucket inside backward; wrap the module with "
                    "step_in_backward=False, or choose one whose state is per parameter"
                )


def state_to_come(optimizers: Iterable[Optimizer]) -> list[object] | None:
    """Return the state in training; None if it is unknown. Local; changes nothing.

    For parameters without any it is what one step makes of stand-ins, with gradients, on the meta device.
    """
    found: list[object] = [optimizer.state for optimizer in optimizers]
    for optimizer in optimizers:
        rehearsed, groups = BucketOptimizer(optimizer, ()), []
        for group in optimizer.param_groups:
            missing = [each for each in group["params"] if each.requires_grad and not optimizer.state.get(each)]
            stand_ins = [nn.Parameter(torch.empty_like(parameter, device="meta")) for parameter in missing]
            for stand_in in stand_ins:
                stand_in.grad = torch.empty_like(stand_in)
            eager = dict.fromkeys(group.keys() & {"foreach", "fused", "capturable"}, False)  # as any device can
            groups.append({**group, **eager, "params": stand_ins})
        rehearsed._view.state, rehearsed._view.param_groups = collections.defaultdict(dict), groups
        try:
            with torch.no_grad():
                rehearsed._step(rehearsed._view)
        except Exception:  # it needs a closure, or reads values
            return None
        found.append(rehearsed._view.state)
    return found


NOT_COUNTED = ("state", "param_groups", private_torch.FLAG_OF_FUSED)
"""Attributes of an optimizer that its steps may set; the last one is a flag of torch's fused optimizers."""

_REPLACED = ("step", "register_step_pre_hook", private_torch.SUPPORTS_SCALING)
"""Attributes of an optimizer that replace those of its class while a model is open."""


def replace_step(optimizer: Optimizer, on_step: Callable[[Optimizer, Closure | None], Any], *, by_bucket: bool) -> None:
    """Let ``optimizer.step()`` call ``on_step``. Schedulers, which wrap this method of the object, see every call.

    A GradScaler then steps the optimizer even after an overflow, and leaves the division by the scale to ``on_step``.
    """
    scheduled = private_torch.is_watched_by_scheduler(optimizer.step)

    def step(optimizer: Optimizer, closure: Closure | None = None) -> Any:
        if scheduled:  # by a scheduler that was made before the wrapper
            private_torch.note_step_called(optimizer)
        return on_step(optimizer, closure)

    if scheduled:
        private_torch.note_watched_by_scheduler(step)
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    setattr(optimizer, private_torch.SUPPORTS_SCALING, True)
    if by_bucket:
        optimizer.register_step_pre_hook = _refuse_pre_hook  # type: ignore[method-assign,assignment]


def restore_step(optimizer: Optimizer) -> None:
    """Restore the optimizer's own methods."""
    supports_scaling = getattr(optimizer, "fused", False) or optimizer.defaults.get("fused")
    for name in _REPLACED:
        optimizer.__dict__.pop(name, None)
    if supports_scaling:  # as torch's fused optimizers do themselves
        setattr(optimizer, private_torch.SUPPORTS_SCALING, True)


@Optimizer.profile_hook_step
def fire_step_hooks(optimizer: Optimizer) -> None:
    """Call the hooks that were registered for the steps of ``optimizer``."""


def _refuse_pre_hook(_: object) -> NoReturn:
    raise ValueError(f"register_step_pre_hook cannot work here: {_NO_PRE_HOOKS}")


def describe_optimizers(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Describe type, groups and constants, for the comparison between ranks."""
    described = {}
    for number, optimizer in enumerate(optimizers, 1):
        described[f"optimizer {number}"] = type(optimizer).__name__
        for place, group in enumerate(optimizer.param_groups, 1):
            constants = {name: value for name, value in group.items() if isinstance(value, int | float | bool | tuple)}
            text = ", ".join(f"{name}={value}" for name, value in sorted(constants.items()))
            described[f"optimizer {number} group {place}"] = f"{len(group['params'])} parameters, {text}"
    return described


def requires_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step()`` requires a closure, which it then evaluates as often as it likes, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class EvaluatedClosure:
    """The replacement for a closure that was evaluated in advance: it returns the loss, once.

    Nearly all optimizers evaluate their closure once, before anything else. When it is evaluated before the exchange is
    combined, its gradients are computed at x(t), and the messages have this time to arrive, as in a loop without a
    closure.
    """

    def __init__(self, optimizer: Optimizer, closure: Closure) -> None:
        if optimizer.__dict__.get("found_inf") is not None:
            raise ValueError(
                "scaler.step(optimizer, closure) cannot work: the scaler looks for overflows before the closure is "
                "evaluated; evaluate it yourself, then call scaler.step(optimizer)"
            )
        with torch.enable_grad():
            self.loss = closure()
        self._optimizer = optimizer
        self._where = ""
        self._seen: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        self._was_called = False

    def hand_over(self, where: str) -> None:
        """Note that the optimizer is about to be stepped; ``where`` is for error texts."""
        self._where = where
        held = held_by([self._optimizer])
        self._seen = [(parameter, parameter._version, parameter.grad) for parameter in held]

    def __call__(self) -> Any:
        """Return the loss."""
        is_elsewhere = any(
            parameter._version != version or parameter.grad is not gradient
            for parameter, version, gradient in self._seen
        )
        if self._was_called or is_elsewhere:
            when = "again" if self._was_called else "after it has changed parameters or gradients"
            raise GossipError(
                f"{self._where}: {type(self._optimizer).__name__}.step(closure) evaluates the closure {when}, but a "
                "closure that step() does not require is evaluated once, before the exchange is mixed in; make it "
                "required in a subclass: def step(self, closure): return super().step(closure)"
            )
        self._was_called = True
        return self.loss


class OptimizerWatch:
    """Raises when an optimizer is stepped that holds a parameter of an open model but is not one of the model's own.

    Either its gradients have been used up inside backward, or its step would not be exchanged: in both cases the loop
    would silently train something other than it says.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], optimizers: Iterable[Optimizer]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters}
        self._is_paused = False
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet(optimizers)
        _watches.add(self)
        _look_at_every_step()

    def check(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer holds a parameter of this model but is not one of the model's own. Local."""
        if self._is_paused or optimizer in self._known:
            return
        for parameter in held_by([optimizer]):
            if id(parameter) in self._names:
                raise GossipError(
                    f"{type(optimizer).__name__}.step(): parameter {self._names[id(parameter)]!r} belongs to a "
                    "GossipDataParallel, which only its own optimizer steps; pass this one to "
                    "GossipDataParallel(module, optimizer), for the usual loop with step_in_backward=False"
                )
        self._known.add(optimizer)  # it does not concern this model

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Suspend the watch while the model's own optimizers step, as they may contain others."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def close(self) -> None:
        """Stop watching. Local."""
        _watches.discard(self)


_watches: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()


@functools.cache
def _look_at_every_step() -> None:
    """Have torch call all watches before any optimizer steps.

    There is a single permanent hook. A hook for each model would be removed when the garbage collector finds the model,
    possibly while torch iterates over its hooks.
    """

    def on_step(optimizer: Optimizer, *_: Any) -> None:
        for watch in tuple(_watches):
            watch.check(optimizer)

    register_optimizer_step_pre_hook(on_step)
