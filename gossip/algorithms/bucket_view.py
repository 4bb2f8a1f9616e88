"""An algorithm's view of a bucket, for one rank or for many at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from gossip.compression.conversation import accumulation_dtype

PerParameter = float | torch.Tensor
"""One number, or a tensor [..., numel] where it differs between parameters."""


class Arrived(NamedTuple):
    r"""The messages that have arrived on one channel.

    Attributes
    ----------
    difference : Tensor, [..., numel]
        :math:`\sum_j W_{ij} m_j - m_i` over all messages :math:`m_j` as they were sent, in the accumulation dtype. May
        be used as scratch space.
    sent : Tensor, [..., numel], or None
        :math:`m_i`, only with ``gossip.Algorithm.reads_sent``; must not be written.
    """

    difference: torch.Tensor
    sent: torch.Tensor | None = None


class BucketView:
    r"""The values of one bucket, and what the algorithm keeps for it.

    Leading dimensions are workers: [numel] for one rank, [k, numel] for k virtual workers.

    Parameters
    ----------
    values : Tensor, [..., numel]
        The values that the forward pass reads; written in place.
    parameters : sequence of Parameter
        The parameters in the bucket; empty for a bucket of buffers.
    split : callable
        Returns a tensor like ``values`` as one view per parameter, in the parameter's shape.
    optimizers : sequence of Optimizer
        The optimizers; at most one of them holds each parameter.
    ranks : range
        The rank of each row of values; not set for a bucket of buffers.

    Attributes
    ----------
    kept : dict of str to Tensor, [..., numel]
        The algorithm's state, in the accumulation dtype.
    numbers : dict of str to Tensor, [..., 1], float64
        The scalars that travel with the bucket's messages, and the counts that do not.
    round_index : int
        The index of the step being made, and so of the round that it sends; in :meth:`Algorithm.arrive`, of the round
        in which the messages were sent.
    before : Tensor, [..., numel]
        The values before the optimizer's update, where the algorithm remembers them
        (``gossip.Algorithm.remembers_before``); else the values.
    samples : float or Tensor, [..., 1]
        How many samples the update counts, where the algorithm weighs ranks (``gossip.Algorithm.weighted``).
    lags : Tensor, [..., 1], optional
        How many steps fewer each of several ranks has made than the optimizers have counted.
    skipped : Tensor, [...], bool, optional
        Which of several ranks make no update now, so that nothing is added to their optimizers' state.
    exchanges : bool
        Whether the current step ends with an exchange in which this rank takes part.
    rates, earlier_rates : tuple of float
        The learning rate of each parameter in the newest step, and the last one before it that was not 0; empty where
        the algorithm does not follow them (``gossip.Algorithm.follows_learning_rate``).
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
        self.samples: float | torch.Tensor = 1.0
        self.lags: torch.Tensor | None = None
        self.skipped: torch.Tensor | None = None
        self.exchanges = True
        self.before = values
        self.rates: tuple[float, ...] = ()
        self.earlier_rates: tuple[float, ...] = ()
        self._split = split
        self._optimizers = optimizers
        self._part_of: tuple[BucketView, slice] | None = None

    def part(self, part: slice) -> BucketView:
        """Return a view of a contiguous part of the values, without the parameters."""
        view = BucketView(self.values[..., part], ranks=self.ranks)
        view.kept = {name: tensor[..., part] for name, tensor in self.kept.items()}
        view.numbers, view.round_index, view.samples = self.numbers, self.round_index, self.samples
        view._part_of = self, part
        return view

    @property
    def is_last_part(self) -> bool:
        """Whether this is the last one of the parts in which a bucket's values arrive, or the whole bucket."""
        if self._part_of is None:
            return True
        whole, part = self._part_of
        return bool(part.stop == whole.values.shape[-1])

    def zeros(self) -> torch.Tensor:
        """Return a tensor of zeros like the values, in the accumulation dtype."""
        wide = accumulation_dtype(self.values.dtype)
        return torch.zeros_like(self.values, dtype=wide)

    def slots(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return a tensor like the values as one view per parameter, in the parameter's shape."""
        return self._split(flat)

    # ------------------------------------------------------------------ gradients

    def gradient(self) -> torch.Tensor:
        """Return a copy of all gradients, [..., numel], in the accumulation dtype; zeros where there is none."""
        flat = self.zeros()
        for slot, parameter in zip(self.slots(flat), self.parameters, strict=True):
            if parameter.grad is not None:
                slot.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        return flat

    def set_gradient(self, flat: torch.Tensor) -> None:
        """Set the gradient of every parameter that requires one to its part of ``flat``."""
        for slot, parameter in zip(self.slots(flat.to(self.values.dtype)), self.parameters, strict=True):
            parameter.grad = slot if parameter.requires_grad else None

    # ------------------------------------------------------------------ optimizers

    def follow_learning_rate(self) -> None:
        """Record the learning rates of a step that has been made."""
        now = self._of_groups(lambda group: 1.0 if group.get("lr") is None else group["lr"])
        known = zip(self.rates, self.earlier_rates, strict=True)
        self.earlier_rates = tuple(newest or earlier for newest, earlier in known) or now
        self.rates = now

    @property
    def learning_rate(self) -> PerParameter:
        """The learning rate of the newest step; 1 for parameters that no optimizer holds."""
        return self._of_rates(lambda now, _: now)

    @property
    def learning_rate_ratio(self) -> PerParameter:
        """The learning rate divided by the last one before it that was not 0; 1 while it is 0."""
        return self._of_rates(lambda now, before: now / before if now and before else 1.0)

    @property
    def learning_rate_growth(self) -> PerParameter:
        """The same, but at most 10: what a tiny rate has left of other things than gradients must not grow with it."""
        return self._of_rates(lambda now, before: min(now / before, 10.0) if now and before else 1.0)

    @property
    def inverse_learning_rate(self) -> PerParameter:
        """The reciprocal of the learning rate of the newest step; 0 where that was 0."""
        return self._of_rates(lambda now, _: 1 / now if now else 0.0)

    @property
    def is_moving(self) -> PerParameter:
        """1 where the newest step's learning rate was not 0; 0 elsewhere, where nothing is mixed or applied."""
        return self._of_rates(lambda now, _: float(now != 0))

    def _of_rates(self, number: Callable[[float, float], float]) -> PerParameter:
        if self._part_of is not None:
            whole, part = self._part_of
            numbers = whole._of_rates(number)
            return numbers[..., part] if isinstance(numbers, torch.Tensor) else numbers
        return self._spread([number(*rates) for rates in zip(self.rates, self.earlier_rates, strict=True)])

    def group_number(self, pick: Callable[[Mapping[str, Any]], float]) -> PerParameter:
        """Return the number that ``pick`` reads from each parameter's group; 1 for one that no optimizer holds."""
        return self._spread(self._of_groups(pick))

    @property
    def updates_made(self) -> PerParameter:
        """The number of updates that the optimizers have counted ("step"); 0 where they do not count."""
        counted = self._spread([float(self._entry(parameter).get("step", 0.0)) for parameter in self.parameters])
        return counted if self.lags is None else counted - self.lags

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
        """Return a copy of one entry of the optimizers' state, [..., numel]; zeros where there is none yet."""
        flat = self.zeros()
        for slot, parameter in zip(self.slots(flat), self.parameters, strict=True):
            if (entry := self._entry(parameter).get(key)) is not None:
                slot.copy_(entry)
        return flat

    def add_to_optimizer_state(self, key: str, difference: torch.Tensor, *, minimum: float | None = None) -> None:
        """Add to that entry where it exists, in place, and clamp the result to at least ``minimum``."""
        if self.skipped is not None:
            difference[self.skipped] = 0
        for slot, parameter in zip(self.slots(difference), self.parameters, strict=True):
            if (entry := self._entry(parameter).get(key)) is not None:
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
    """Return ``tensor`` times ``factor``, or the tensor itself if the factor is 1."""
    return tensor if isinstance(factor, float) and factor == 1 else tensor * factor
