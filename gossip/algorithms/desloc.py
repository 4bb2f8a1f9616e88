"""DES-LOC: values and the optimizer's moments are mixed with periods of their own."""

import copy
import math
from collections.abc import Mapping
from typing import Self

import torch
from torch.optim import Optimizer

from gossip.algorithms.base import VALUES, Form, add_
from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.algorithms.integral_correction import SECOND_MOMENT
from gossip.algorithms.outer_steps import Periodic
from topologies import Topology
from topologies.validation import check_integer

_CONSTANTS_OF = {
    "exp_avg": {"betas"},
    SECOND_MOMENT: {"amsgrad", "momentum_decay", "decoupled_weight_decay", "accum_iter"},
    "momentum_buffer": {"momentum"},
}
"""For each moment constants of which the groups of optimizers that keep it have one."""


class DESLOC(Periodic):
    r"""Gossip every H steps, in some of which the optimizer's moments are mixed too, each with a period of its own.

    With :math:`r` the number of an exchange, :math:`W` its matrix, and for each moment :math:`m` its period :math:`k_m`
    in exchanges:

    .. math::
        x_i \leftarrow \sum_j W_{ij}\, x_j, \qquad
        m_i \leftarrow \sum_j W_{ij}\, m_j \quad \text{in one of every } k_m \text{ exchanges}

    A moment with the decay :math:`\beta` forgets in about :math:`1 / (1 - \beta)` steps, so that a slower one need not
    be mixed as often: here Adam's second moments half as often as its first ones. A moment takes each round of the
    topology in turn: where its period and the topology's have a common divisor, its exchanges are shifted by one from
    time to time, because it would otherwise be mixed by the same few rounds for good.

    Sends 1 message every H steps and :math:`1 / k_m` of one for each moment, and keeps nothing besides the optimizer's
    own state. Works with any doubly stochastic W; with the exact average it is the published algorithm. Use it where
    links are too slow for a message per step and ranks hold different data, whose moments differ.

    Parameters
    ----------
    period : int
        H, the number of steps from one exchange to the next, at least 1.
    moments : mapping of str to int, optional
        For each entry of the optimizer's state that is mixed, every how many exchanges it is, each at least 1; by
        default ``{"exp_avg": 3, "exp_avg_sq": 6}``, for Adam and AdamW. With SGD or Muon ``{"momentum_buffer": 3}``.
    form : str
        "atc": the messages are awaited before the next forward pass; "awc": they have the whole next iteration.

    References
    ----------
    Iacob et al., "DES-LOC: Desynced low communication adaptive optimizers for training foundation models", ICLR 2026,
    algorithm 1, whose averages are here those of any graph; the shifts are this project's own.
    """

    _constants = ("period", "moments")

    def __init__(self, period: int = 50, moments: Mapping[str, int] | None = None, form: Form = "atc") -> None:
        super().__init__(period, form)
        given = {"exp_avg": 3, SECOND_MOMENT: 6} if moments is None else moments
        if not isinstance(given, Mapping) or not given or VALUES in given or not all(isinstance(x, str) for x in given):
            raise ValueError(
                "moments must map entries of the optimizer's state to their periods in exchanges, such as "
                f'{{"exp_avg": 3, "exp_avg_sq": 6}}, got {given!r}'
            )
        self.moments = {name: check_integer(f"moments[{name!r}]", each, minimum=1) for name, each in given.items()}
        self.sends = (VALUES, *self.moments)  # type: ignore[misc]
        self._num_rounds = 1

    def on(self, topology: Topology, delivers: float = 1.0) -> Self:
        del delivers
        bound = copy.copy(self)
        bound._num_rounds = topology.period or 1
        return bound

    def schedule(self, topology: Topology) -> Topology:
        return topology.every(self.period)

    def check_optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        constants = {key for group in groups for key, value in group.items() if value or key != "momentum"}
        kept = [name for name, own in _CONSTANTS_OF.items() if own & constants]
        if missing := self.moments.keys() - set(kept):
            names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
            instead = {name: 6 if name == SECOND_MOMENT else 3 for name in kept}
            raise ValueError(
                f"algorithm DESLOC mixes {sorted(missing)}, which the optimizer {names or 'None'} does not keep; "
                + (f"pass moments={instead}" if instead else "choose an optimizer with momentum, or topology.every(k)")
            )

    def is_sent(self, channel: str, step: int) -> bool:
        if channel == VALUES:
            return True
        every, number = self.moments[channel], step // self.period
        common = math.gcd(every, self._num_rounds)
        shift = number // every // (self._num_rounds // common) % common
        return number % every == every - 1 - shift

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        for name in self.moments:
            minimum = 0.0 if name == SECOND_MOMENT else None
            bucket.add_to_optimizer_state(name, got[name].difference, minimum=minimum)
        add_(bucket.values, got[VALUES].difference)

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        return {VALUES: bucket.values, **{name: bucket.optimizer_state(name) for name in self.moments}}
