"""What an algorithm sees of a bucket: at one rank, or at many at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

PerParameter = float | torch.Tensor
"""One number, or where parameters differ a tensor [..., numel]."""


class Arrived(NamedTuple):
    r"""What has arrived of one channel.

    Attributes
    ----------
    difference : Tensor, [..., numel]
        :math:`\sum_j W_{ij} m_j - m_i` over all messages :math:`m_j` as they were sent, in the dtype of accumulation.
        It may be used up as scratch.
    sent : Tensor, [..., numel], or None
        :math:`m_i`, with ``gossip.Algorithm.reads_sent`` alone; not to be written.
    """

    difference: torch.Tensor
    sent: torch.Tensor | None = None


class BucketView:
    r"""One bucket's values, and what the algorithm keeps for it.

    Leading dimensions are workers: [numel] at one rank, [k, numel] for k virtual workers.

    Parameters
    ----------
    values : Tensor, [..., numel]
        What the forward pass reads; written in place.
    parameters : sequence of Parameter
        Those in the bucket; none of a bucket of buffers.
    split : callable
        A tensor like ``values`` as one view per parameter, in its shape.
    optimizers : sequence of Optimizer
        Of which each parameter is held by one at most.
    ranks : range
        Whose values they are, one for each row; of a bucket of buffers not told.

    Attributes
    ----------
    kept : dict of str to Tensor, [..., numel]
        The algorithm's state, in the dtype of accumulation.
    numbers : dict of str to Tensor, [..., 1], float64
        The scalars that travel with the bucket's messages.
    round_index : int
        Of the step that is made, and so of the round that it sends; where messages arrive, of the round that sent them.
    before : Tensor, [..., numel]
        The values before the optimizer's update, where the algorithm remembers them
        (``gossip.Algorithm.remembers_before``); else the values.
    exchanges : bool
        Whether the step that is made ends with an exchange that this rank takes part in.
    rates, earlier_rates : tuple of float
        By parameter the learning rate of the newest step, and the last one before it that was not 0; empty where the
        algorithm does not follow them (``gossip.Algorithm.follows_learning_rate``).
    """

    def __init__(
        self,
        values: torch.Tensor,
        parameters: Sequence[nn.Parameter] = (),
        split: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda _: (),
        optimizers: Sequence[Optimizer] = (),
        ranks: range = range(0),
    ) -> None:
        self.values = values
        self.parameters = parameters
        self.ranks = ranks
        self.kept: dict[str, torch.Tensor] = {}
        self.numbers: dict[str, torch.Tensor] = {}
        self.round_index = 0
        self.exchanges = True
        self.before = values
        self.rates: tuple[float, ...] = ()
        self.earlier_rates: tuple[float, ...] = ()
        self._split = split
        self._optimizers = optimizers
        self._part_of: tuple[BucketView, slice] | None = None

    def part(self, part: slice) -> BucketView:
        """The same, of some neighbouring values alone, without the parameters."""
        view = BucketView(self.values[..., part], ranks=self.ranks)
        view.kept = {name: tensor[..., part] for name, tensor in self.kept.items()}
        view.numbers, view.round_index = self.numbers, self.round_index
        view._part_of = self, part
        return view

    def zeros(self) -> torch.Tensor:
        """A tensor like the values, in the dtype of accumulation."""
        wide = torch.float64 if self.values.dtype == torch.float64 else torch.float32
        return torch.zeros_like(self.values, dtype=wide)

    def slots(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """A tensor like the values as one view per parameter, in its shape."""
        return self._split(flat)

    # ------------------------------------------------------------------ gradients

    def gradient(self) -> torch.Tensor:
        """All gradients, [..., numel], in the dtype of accumulation; zeros where there is none. A copy."""
        flat = self.zeros()
        for slot, parameter in zip(self.slots(flat), self.parameters, strict=True):
            if parameter.grad is not None:
                slot.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        return flat

    def set_gradient(self, flat: torch.Tensor) -> None:
        """Give every parameter its part as its gradient."""
        for slot, parameter in zip(self.slots(flat.to(self.values.dtype)), self.parameters, strict=True):
            parameter.grad = slot

    # ------------------------------------------------------------------ the optimizers' part

    def follow_learning_rate(self) -> None:
        """Take note of the rates of a step that has been made."""
        now = self._of_groups(lambda group: group["lr"])
        known = zip(self.rates, self.earlier_rates, strict=True)
        self.earlier_rates = tuple(newest or earlier for newest, earlier in known) or now
        self.rates = now

    @property
    def learning_rate(self) -> PerParameter:
        """Of the newest step; 1 for what no optimizer holds."""
        if self._part_of is not None:
            return _of_part(self._part_of[0].learning_rate, self._part_of[1])
        return self._spread(self.rates)

    @property
    def learning_rate_ratio(self) -> PerParameter:
        """By what the learning rate has changed since the last one that was not 0; 1 while it is 0."""
        if self._part_of is not None:
            return _of_part(self._part_of[0].learning_rate_ratio, self._part_of[1])
        pairs = zip(self.rates, self.earlier_rates, strict=True)
        return self._spread([now / before if now and before else 1.0 for now, before in pairs])

    @property
    def inverse_learning_rate(self) -> PerParameter:
        """1 by the learning rate of the newest step; 0 where that was 0."""
        if self._part_of is not None:
            return _of_part(self._part_of[0].inverse_learning_rate, self._part_of[1])
        return self._spread([1 / rate if rate else 0.0 for rate in self.rates])

    @property
    def is_moving(self) -> PerParameter:
        """1 where the learning rate of the newest step was not 0, else 0: nothing is to be mixed or applied there."""
        if self._part_of is not None:
            return _of_part(self._part_of[0].is_moving, self._part_of[1])
        return self._spread([float(rate != 0) for rate in self.rates])

    def group_number(self, pick: Callable[[Mapping[str, Any]], float]) -> PerParameter:
        """A number of the optimizers' parameter groups, found by ``pick``; 1 for what no optimizer holds."""
        return self._spread(self._of_groups(pick))

    @property
    def updates_made(self) -> PerParameter:
        """How many the optimizers have counted, where they do ("step"); else 0."""
        return self._spread([float(self._entry(parameter).get("step", 0.0)) for parameter in self.parameters])

    def _of_groups(self, pick: Callable[[Mapping[str, Any]], float]) -> tuple[float, ...]:
        found = {
            id(parameter): float(pick(group))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return tuple(found.get(id(parameter), 1.0) for parameter in self.parameters)

    def _spread(self, numbers: Sequence[float]) -> PerParameter:
        if len(set(numbers)) <= 1:
            return numbers[0] if numbers else 1.0
        flat = torch.ones_like(self.zeros())
        for slot, number in zip(self.slots(flat), numbers, strict=True):
            slot.fill_(number)
        return flat

    def optimizer_state(self, key: str) -> torch.Tensor:
        """One entry of the optimizers' state of all parameters, [..., numel]; zeros where there is none yet. A copy."""
        flat = self.zeros()
        for slot, parameter in zip(self.slots(flat), self.parameters, strict=True):
            entry = self._entry(parameter).get(key)
            if entry is not None:
                slot.copy_(entry)
        return flat

    def add_to_optimizer_state(self, key: str, difference: torch.Tensor, *, minimum: float | None = None) -> None:
        """Add to that entry, in place, where there is one; not below ``minimum``."""
        for slot, parameter in zip(self.slots(difference), self.parameters, strict=True):
            entry = self._entry(parameter).get(key)
            if entry is not None:
                entry.add_(slot)
                if minimum is not None:
                    entry.clamp_(min=minimum)

    def _entry(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                found: dict[str, torch.Tensor] = optimizer.state[parameter]
                return found
        return {}


def scaled(tensor: torch.Tensor, factor: PerParameter) -> torch.Tensor:
    """``tensor`` times ``factor``; the tensor itself if that is 1."""
    return tensor if isinstance(factor, float) and factor == 1 else tensor * factor


def _of_part(numbers: PerParameter, part: slice) -> PerParameter:
    return numbers[..., part] if isinstance(numbers, torch.Tensor) else numbers
