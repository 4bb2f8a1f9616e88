"""The bases of algorithms with a period, and of those with an anchor from which local steps start.

And the optimizers of outer steps: a fixed rate, Nesterov's momentum, or an optimizer of torch that the user chooses.
"""

import inspect
import itertools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.algorithms.base import Form, Kept, WithForm
from gossip.algorithms.bucket_view import BucketView
from topologies import Round, Topology
from topologies.validation import check_integer, check_real

OuterFactory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
ANCHOR, VELOCITY = "anchor", "velocity"
_STEPS = "outer_steps"


class OuterOptimizer:
    """Moves an anchor against a difference, by ``lr``.

    Attributes
    ----------
    states : tuple of str
        What it keeps in ``BucketView.kept``, besides the anchor.
    counts : tuple of str
        What it keeps in ``BucketView.numbers``.
    """

    states: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()

    def __init__(self, lr: float) -> None:
        self._lr = lr

    def step_(self, bucket: BucketView, delta: torch.Tensor) -> None:
        """Move the anchor, in place; uses up ``delta``, [..., numel]."""
        bucket.kept[ANCHOR].sub_(delta.mul_(self._lr))


class Nesterov(OuterOptimizer):
    r"""Nesterov's momentum: :math:`v \leftarrow \mu\, v + \Delta`, then the step :math:`\Delta + \mu\, v`."""

    states = (VELOCITY,)

    def __init__(self, lr: float, momentum: float) -> None:
        super().__init__(lr)
        self._momentum = momentum

    def step_(self, bucket: BucketView, delta: torch.Tensor) -> None:
        velocity = bucket.kept[VELOCITY]
        velocity.mul_(self._momentum).add_(delta)
        bucket.kept[ANCHOR].sub_(delta.add_(velocity, alpha=self._momentum), alpha=self._lr)


class TorchOuterOptimizer(OuterOptimizer):
    """An optimizer of torch, whose gradient is the difference.

    Its state is found by a rehearsal on two values. What is like the values is kept as a tensor, and numbers as counts.
    """

    def __init__(self, make: OuterFactory) -> None:
        self._make = make
        self._state, self._described = _rehearsed(make)
        self._tensors = {key: f"outer_{key}" for key, value in self._state.items() if _is_like_values(value)}
        self._scalars = {key: f"outer_{key}" for key in self._state.keys() - self._tensors.keys()}
        self.states, self.counts = tuple(self._tensors.values()), (_STEPS, *sorted(self._scalars.values()))

    def __str__(self) -> str:
        return self._described

    @torch.no_grad()
    def step_(self, bucket: BucketView, delta: torch.Tensor) -> None:
        counts = torch.cat([bucket.numbers[name] for name in self.counts], -1)
        rows = counts.view(-1, len(self.counts))
        # Virtual workers that have made as many steps make the next one together.
        alike = bool((rows == rows[0]).all())
        for place in [(...,)] if alike else itertools.product(*map(range, counts.shape[:-1])):
            numbers = counts[place].view(-1, len(self.counts))[0].tolist()
            self._step_rows(bucket, delta, place, dict(zip(self.counts, numbers, strict=True)))

    def _step_rows(self, bucket: BucketView, delta: torch.Tensor, place: Any, numbers: dict[str, float]) -> None:
        parameter = nn.Parameter(bucket.kept[ANCHOR][place])  # shares its memory
        parameter.grad = delta[place]
        optimizer = _made(self._make, [("anchor", parameter)])
        kept = {key: bucket.kept[name][place] for key, name in self._tensors.items()}
        if numbers[_STEPS]:
            scalars = {key: self._scalar(key, numbers[name], optimizer) for key, name in self._scalars.items()}
            optimizer.state[parameter] = {**kept, **scalars}
        optimizer.step()
        state = optimizer.state[parameter]
        for key, tensor in kept.items():
            if state[key].data_ptr() != tensor.data_ptr():
                tensor.copy_(state[key])
        if bucket.is_last_part:
            bucket.numbers[_STEPS][place] += 1
            for key, name in self._scalars.items():
                bucket.numbers[name][place] = state[key]

    def _scalar(self, key: str, number: float, optimizer: Optimizer) -> Any:
        example = self._state[key]
        if not isinstance(example, torch.Tensor):
            return type(example)(number)
        (group,) = optimizer.param_groups
        device = group["params"][0].device if group.get("fused") else None
        return torch.full_like(example, number, device=device)


def _made(make: OuterFactory, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    optimizer = make(named)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "outer must be a factory of one torch.optim.Optimizer, such as functools.partial(torch.optim.SGD, lr=0.7, "
            f"momentum=0.9, nesterov=True); it returned {type(optimizer).__name__}"
        )
    return optimizer


_VALUES, _GRADIENTS = (1.0, -3.0), ((0.5, 0.25), (-0.25, 1.0), (0.125, 2.0))


def _rehearsed(make: OuterFactory) -> tuple[dict[str, Any], str]:
    """Return the state after three steps on two values, and type and constants as text."""
    if isinstance(make, Optimizer) or not callable(make):
        raise TypeError(
            "outer must be a factory of an optimizer, since each rank makes one for its anchor, such as "
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True); got "
            f"{type(make).__name__}"
        )
    together, optimizer = _three_steps(make, [list(_VALUES)])
    apart, _ = _three_steps(make, [[value] for value in _VALUES])
    name, ((parameter, *_), *_) = type(optimizer).__name__, (group["params"] for group in optimizer.param_groups)
    if not torch.allclose(torch.cat(together), torch.cat(apart), rtol=1e-9, atol=0, equal_nan=True):
        raise ValueError(
            f"outer: {name} computes its update from whole parameters, but an anchor is kept as one vector per bucket; "
            "choose an optimizer that updates each element by itself, such as SGD or Adam"
        )
    state = {key: value for key, value in optimizer.state[parameter].items() if value is not None}
    for key, value in state.items():
        is_number = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)
        if not is_number and not _is_like_values(value):
            raise ValueError(
                f"outer: {name} keeps {key!r}, which is neither a number nor like the parameter, so that it cannot be "
                "kept for an anchor; choose another optimizer, such as SGD or Adam"
            )
    constants = {key: value for key, value in optimizer.defaults.items() if value not in (None, False)}
    return state, f"{name}({' '.join(f'{key}={value}' for key, value in constants.items())})"


def _is_like_values(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (len(_VALUES),) and value.is_floating_point()


def _three_steps(make: OuterFactory, values: list[list[float]]) -> tuple[list[torch.Tensor], Optimizer]:
    parameters = [nn.Parameter(torch.tensor(each, dtype=torch.float64)) for each in values]
    named = [(f"anchor{number}", parameter) for number, parameter in enumerate(parameters)]
    try:
        optimizer = _made(make, named)
    except ValueError as error:
        raise ValueError(f"outer: {error}") from error
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for gradients in _GRADIENTS:
        parts = torch.tensor(gradients, dtype=torch.float64).split([len(each) for each in values])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.clone()
        try:
            optimizer.step()
        except Exception as error:
            raise ValueError(
                f"outer: {type(optimizer).__name__} cannot update a vector ({error}); choose an optimizer that updates "
                "each element by itself, such as SGD or Adam"
            ) from error
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        if changed := [key for key, value in before.items() if group[key] is not value]:
            raise ValueError(
                f"outer: {type(optimizer).__name__} keeps {changed[0]!r} for all parameters at once, so that it cannot "
                "be kept for an anchor; choose an optimizer whose state is per parameter, such as SGD or Adam"
            )
    return [parameter.detach() for parameter in parameters], optimizer


class Periodic(WithForm):
    """Algorithms in which every ``period``-th step is another one."""

    _constants: tuple[str, ...] = ("period",)

    def __init__(self, period: int, form: Form) -> None:
        self.period = check_integer("period", period, minimum=1)
        super().__init__(form)

    def _ends_period(self, step: int) -> bool:
        return (step + 1) % self.period == 0


class Anchored(Periodic):
    """Algorithms that keep an anchor, which moves in every ``period``-th step, also on a rank without a peer.

    A global average sets the anchor to the mean.
    """

    def steps_alone(self, step: int, round_: Round) -> bool:
        del round_
        return self._ends_period(step)

    def begin(self, bucket: BucketView) -> None:
        super().begin(bucket)
        self.averaged(bucket)

    def averaged(self, bucket: BucketView) -> None:
        bucket.kept[ANCHOR].copy_(bucket.values)


class OuterSteps(Anchored):
    """Ranks make ``period`` local steps from an anchor and then a joint outer step.

    Outer step s uses round s of the topology; a rank without a peer makes it alone.
    """

    _outer: OuterOptimizer

    def __init__(self, period: int, form: Form, outer_lr: float, outer_momentum: float = 0.0) -> None:
        super().__init__(period, form)
        self.outer_lr = check_real("outer_lr", outer_lr, "above 0 and finite", example=0.7)
        self.outer_momentum = check_real("outer_momentum", outer_momentum, "at least 0 and below 1", example=0.9)

    def _step_by(
        self, outer: OuterFactory | None, own: OuterOptimizer, scope: Literal["own", "common"], **constants: float
    ) -> None:
        """Make outer steps by the user's optimizer, or by ``own`` with its ``constants`` if there is none."""
        if outer is not None:
            self._outer = self.outer = TorchOuterOptimizer(outer)
            defaults = inspect.signature(type(self)).parameters
            for name, value in constants.items():
                if name in defaults and value != defaults[name].default:
                    raise ValueError(f"outer={self.outer} has constants of its own, got {name}={value} too; drop one")
            self._constants = (*(name for name in self._constants if name not in constants), "outer")
        else:
            self._outer = own
        self.counts = self._outer.counts
        self.keeps = {**self.keeps, **dict.fromkeys((ANCHOR, *self._outer.states), Kept("mean", scope))}

    def schedule(self, topology: Topology) -> Topology:
        return topology.every(self.period)
