"""One torch optimizer, stepped bucket by bucket."""

from __future__ import annotations

import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossip.errors import GossipError

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]


def build_optimizer(optimizer: Optimizer | OptimizerFactory | None, module: nn.Module) -> Optimizer | None:
    """The one Optimizer: the one given, or what the factory makes of all named parameters.

    Raises
    ------
    TypeError
        Neither an Optimizer nor a factory of one.
    ValueError
        It steps by a closure, or holds a parameter that the module does not have.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer or a factory such as functools.partial(torch.optim.SGD, "
                f"lr=0.1), got {type(optimizer).__name__}"
            )
        built = optimizer(list(module.named_parameters()))
        if not isinstance(built, Optimizer):
            raise TypeError(f"the optimizer factory must return a torch.optim.Optimizer, got {type(built).__name__}")
        optimizer = built
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates a closure several times a step, which cannot run inside backward; "
            "choose an optimizer that steps from gradients alone"
        )
    known = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that the module does not have; "
                    "build it over the parameters of the module that is wrapped"
                )
    return optimizer


class BucketOptimizer:
    """An optimizer's algorithm restricted to some of its parameters.

    It shares the optimizer's state and reads its ``param_groups`` at every step, so that a scheduler, a logger or a
    state_dict sees one optimizer only.

    Parameters
    ----------
    optimizer : Optimizer
    parameters : sequence of Parameter
        Those without a gradient are skipped, as ever.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        mine = {id(parameter) for parameter in parameters}
        self._members = [
            [parameter for parameter in group["params"] if id(parameter) in mine] for group in optimizer.param_groups
        ]
        # Not copy.copy: that goes through __getstate__, which keeps only what a checkpoint needs.
        self._view: Any = object.__new__(type(optimizer))
        self._view.__dict__.update(optimizer.__dict__)
        self._view.__dict__.pop("step", None)
        self._view._optimizer_step_pre_hooks = OrderedDict()
        self._view._optimizer_step_post_hooks = OrderedDict()
        step: Callable[..., Any] = type(optimizer).step
        if getattr(step, "hooked", False):  # torch's profiling and hook wrapper: once per step, not once per bucket
            step = step.__wrapped__  # type: ignore[attr-defined]
        self._step = step
        self._is_checked = False

    def step(self) -> None:
        """Update the parameters that have a gradient, and drop their gradients."""
        if len(self._optimizer.param_groups) != len(self._members):
            raise ValueError(
                f"the optimizer has {len(self._optimizer.param_groups)} parameter groups, but had {len(self._members)} "
                "when the model was wrapped; add all groups before wrapping, with lr=0 where they start later"
            )
        groups = zip(self._optimizer.param_groups, self._members, strict=True)
        self._view.state = self._optimizer.state
        own_groups = [{**group, "params": members} for group, members in groups if members]
        self._view.param_groups = own_groups
        before = None if self._is_checked else (self._own_attributes(), [dict(group) for group in own_groups])
        self._step(self._view)
        if before is not None and own_groups:
            self._check_state_is_per_parameter(*before)
        for members in self._members:
            for parameter in members:
                parameter.grad = None

    def _own_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._view).items() if name not in ("state", "param_groups")}

    def _check_state_is_per_parameter(self, attributes: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Refuse an optimizer that counts in its groups or in itself: each bucket would count for itself, in vain."""
        self._is_checked = True
        pairs = [(self._own_attributes(), attributes), *zip(self._view.param_groups, groups, strict=True)]
        for after, before in pairs:
            changed = [name for name in after if name not in before or after[name] is not before[name]]
            if changed:
                raise GossipError(
                    f"{type(self._optimizer).__name__} keeps {changed[0]!r} for several parameters together, "
                    "which cannot be stepped bucket by bucket inside backward; choose one whose state is per parameter"
                )


def make_step_passive(optimizer: Optimizer) -> None:
    """Let ``optimizer.step()`` do nothing but be called: the buckets have done the work.

    Schedulers, which wrap this method of the object, see that steps are made.
    """

    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")

    def step(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            raise ValueError(
                "optimizer.step(closure) cannot work here: the update has been made inside backward; call it without"
            )
        if scheduled:  # by a scheduler that is older than the wrapper
            optimizer._opt_called = True  # type: ignore[attr-defined]

    passive = Optimizer.profile_hook_step(step)
    if scheduled:
        passive._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(passive, optimizer)  # type: ignore[method-assign]
