"""Gossip with a proportional and an integral gain, which converges to the optimum of the average objective."""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch.optim import Adam, NAdam, Optimizer, RAdam

from gossip.algorithms.base import VALUES, Form, Kept, Requires, WithForm, add_
from gossip.algorithms.bucket_view import Arrived, BucketView, scaled
from topologies import Topology
from topologies.analysis import connected, consensus_rate
from topologies.analysis.exactness import known_exact_after
from topologies.analysis.static_rounds import is_static_and_symmetric
from topologies.validation import check_real

CORRECTION, SECOND_MOMENT = "correction", "exp_avg_sq"


class Gains(NamedTuple):
    """The factors by which an exchange enters the values and the correction, from a round on."""

    start: int
    gamma: float
    kappa: float


class IntegralCorrection(WithForm):
    r"""Gossip in which the accumulated pull of a rank's peers becomes a part of its every step.

    Where ranks hold different data, gossip stalls where each rank's pull towards its own optimum balances the pull of
    its peers. The accumulated pull of the peers, the correction :math:`c_i`, takes over its lasting part, so that in
    the end the replicas agree. With :math:`u_i(t)` the update of any optimizer, :math:`\eta(t)` the learning rate and
    :math:`d_i = \sum_j W_{ij} m_j - m_i` what an exchange adds:

    .. math::
        x_i &\leftarrow x_i + \gamma\, d_i, \qquad c_i \leftarrow c_i + \kappa\, d_i \qquad \text{on arrival} \\
        c_i &\leftarrow \frac{\eta(t)}{\eta(t-1)}\, c_i, \qquad x_i \leftarrow x_i + u_i(t) + c_i
            \qquad \text{then } x_i \text{ is sent}

    The form "awc" (adapt while communicating) gives an exchange the whole next iteration; "atc" (adapt then combine)
    awaits it before the next forward pass, and mixes better. :math:`\sum_i c_i = 0`: the average of the replicas
    follows the average of the updates, whatever compression took from the messages. A step whose learning rate is 0
    applies nothing, and what it sends is not mixed; with "awc" what the step before it has sent still is. A rank whose
    update is skipped still applies its correction.

    With ``gamma`` = ``kappa`` = 1/2 on a static symmetric W this is EXTRA ("awc") and exact diffusion ("atc"), and
    these are the default gains on such a topology. On any other, :math:`\kappa = 1 / (4 \tau)` for "awc" and :math:`1 /
    (2 \tau)` for "atc", where :math:`\tau` is the number of steps in which the schedule mixes: the number of rounds
    after which it is exact, otherwise :math:`1 / \log(1 / \text{rate})` and at least a period; and :math:`\gamma = 1 -
    \kappa / 2`. With these gains, a mode of a static W with a shared Hessian is stable wherever it is stable without
    the correction. Where a compression delivers only a share of a difference in an exchange, as CHOCO does,
    :math:`\kappa` is multiplied by that share.

    The correction is added to the step that Adam makes of a gradient, not to the gradient. The replicas therefore
    converge to the point where the updates cancel, :math:`\sum_i u_i = 0`. It differs from the point where the
    gradients cancel if ranks divide them by different second moments, because their noise differs.
    ``second_moment="exchange"`` mixes Adam's second moments like the values: they become equal, and that bias vanishes.

    Sends one message per step, or two with the second moments, and keeps one tensor per bucket. Works with any doubly
    stochastic W. Use it where ranks hold different data, or where there are many ranks.

    Parameters
    ----------
    form : str
        When an exchange is awaited, "awc" or "atc".
    gamma, kappa : float, optional
        The gains, from 0 to 1, ``gamma`` above 0; by default as above, for each phase of a schedule.
    second_moment : str
        "local": each rank keeps its own; "exchange": they are mixed, for ``torch.optim.Adam``, ``AdamW``, ``NAdam`` or
        ``RAdam``.

    References
    ----------
    Shi, Ling, Wu and Yin, "EXTRA: An exact first-order algorithm for decentralized consensus optimization", SIAM
    Journal on Optimization 25 (2), 2015. Yuan, Ying, Zhao and Sayed, "Exact diffusion for distributed optimization and
    learning, part I", IEEE Transactions on Signal Processing 67 (3), 2019. Tang et al., "D2: Decentralized training
    over decentralized data", ICML 2018. The gains for schedules that change are this project's own.
    """

    keeps: Mapping[str, Kept] = {CORRECTION: Kept("zero")}
    follows_learning_rate = True
    _takes_textbook_gains: ClassVar[bool] = True

    def __init__(
        self,
        form: Form = "awc",
        gamma: float | None = None,
        kappa: float | None = None,
        second_moment: Literal["local", "exchange"] = "local",
    ) -> None:
        if gamma is not None:
            check_real("gamma", gamma, "above 0 and at most 1", example=0.5)
        if kappa is not None:
            check_real("kappa", kappa, "between 0 and 1", example=0.5)
        WithForm.__init__(self, form)
        if second_moment not in ("local", "exchange"):
            raise ValueError(f'second_moment must be "local" or "exchange", got {second_moment!r}')
        self.second_moment = second_moment
        if second_moment == "exchange":
            self.sends = (VALUES, SECOND_MOMENT)  # type: ignore[misc]
        self._given = gamma, kappa
        self._gains: tuple[Gains, ...] = ()

    def on(self, topology: Topology, delivers: float = 1.0) -> IntegralCorrection:
        fitted = copy.copy(self)
        fitted._gains = tuple(self._gains_on(topology, delivers))
        return fitted

    def _gains_on(self, topology: Topology, delivers: float) -> Iterator[Gains]:
        """Yield the gains of each phase of a schedule.

        With an exchange every k steps the correction is applied k times as often as it grows, so kappa is divided by k.
        """
        if topology.world_size == 1:
            yield Gains(0, 1.0, 0.0)
            return
        check_connected(topology)
        gamma, kappa = self._given
        for phase in topology.phases:
            if self._takes_textbook_gains and is_static_and_symmetric(phase.topology):
                own_gamma, own_kappa = 0.5, 0.5 * delivers / phase.every
            else:
                steps = steps_to_mix(phase.topology, phase.every)
                own_kappa = delivers / ((2 if self.form == "atc" else 4) * steps)
                own_gamma = 1 - (own_kappa if kappa is None else kappa) / 2
            chosen = own_gamma if gamma is None else gamma, own_kappa if kappa is None else kappa
            yield Gains(phase.start, *chosen)

    def check_optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        super().check_optimizers(optimizers)
        for optimizer in optimizers if self.second_moment == "exchange" else ():
            if not isinstance(optimizer, Adam | NAdam | RAdam):
                raise ValueError(
                    f'algorithm {type(self).__name__} with second_moment="exchange" mixes the second moments of '
                    f"torch.optim.Adam, AdamW, NAdam or RAdam, but the optimizer is {type(optimizer).__name__}; choose "
                    'one of these, or second_moment="local"'
                )

    def gains(self, round_index: int) -> tuple[float, float]:
        """Return gamma and kappa of a round."""
        place = bisect.bisect_right(self._gains, round_index, key=lambda gains: gains.start)
        return self._gains[place - 1][1:]

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        gamma, kappa = self.gains(bucket.round_index)
        difference = scaled(got[VALUES].difference, bucket.is_moving)
        bucket.kept[CORRECTION].add_(difference, alpha=kappa)
        add_(bucket.values, difference, gamma)
        if SECOND_MOMENT in got:
            bucket.add_to_optimizer_state(SECOND_MOMENT, got[SECOND_MOMENT].difference, minimum=0.0)

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        made = dict(super().message(bucket))
        if self.second_moment == "exchange":
            made[SECOND_MOMENT] = bucket.optimizer_state(SECOND_MOMENT)
        return made

    def updated(self, bucket: BucketView) -> None:
        correction = bucket.kept[CORRECTION].mul_(bucket.learning_rate_growth)
        bucket.values.add_(scaled(correction, bucket.is_moving).to(bucket.values.dtype))

    def describe(self) -> str:
        gains = ", ".join(
            f"gamma={gamma:g} kappa={kappa:g}" + f" from round {start}" * (start > 0)
            for start, gamma, kappa in self._gains
        )
        exchanged = ", with second moments" * (self.second_moment == "exchange")
        return f"{type(self).__name__}({self.form}{': ' * bool(gains)}{gains}{exchanged})"


class ExactDiffusion(IntegralCorrection):
    r"""Diffusion with an integral correction, whose fixed point is the optimum itself.

    :class:`IntegralCorrection` in the form "atc" with both gains 1/2 (with an exchange every k steps, :math:`\kappa` is
    divided by k). With plain SGD this is :math:`\psi_i = x_i - \eta g_i`, :math:`\phi_i = \psi_i + x_i -
    \psi_i(t-1)`, :math:`x_i = \sum_j \bar W_{ij} \phi_j` with :math:`\bar W = (I + W) / 2`.

    Sends one message per step and keeps one tensor per bucket. W must be static and symmetric: on a schedule that
    changes from round to round it diverges. Use it where ranks hold different data on a static undirected topology.

    References
    ----------
    Yuan, Ying, Zhao and Sayed, "Exact diffusion for distributed optimization and learning, part I", IEEE Transactions
    on Signal Processing 67 (3), 2019, algorithm 1. Tang et al., "D2: Decentralized training over decentralized data",
    ICML 2018.
    """

    requires = Requires(static=True, symmetric=True, prompt=True)

    def __init__(self) -> None:
        super().__init__("atc")


class Extra(IntegralCorrection):
    r"""EXTRA: gossip with an integral correction, for static undirected topologies.

    :class:`IntegralCorrection` in the form "awc" with both gains 1/2. With plain SGD and :math:`\bar W = (I + W) / 2`

    .. math:: x(t+2) = x(t+1) + W x(t+1) - \bar W x(t) - \eta\, \bigl(g(t+1) - g(t)\bigr)

    Sends one message per step and keeps one tensor per bucket. W must be static and symmetric: on a schedule that
    changes from round to round it diverges.

    References
    ----------
    Shi, Ling, Wu and Yin, "EXTRA: An exact first-order algorithm for decentralized consensus optimization", SIAM
    Journal on Optimization 25 (2), 2015, recursion (2.13).
    """

    requires = Requires(static=True, symmetric=True, prompt=True)

    def __init__(self) -> None:
        super().__init__("awc")


def check_connected(topology: Topology) -> None:
    """Refuse a topology in a phase of which some ranks never get anything from some others."""
    for phase in topology.phases:
        if phase.topology.period is not None and not connected(phase.topology):
            raise ValueError(
                f"topology {topology.name!r} never brings all ranks together: an integral correction would grow "
                "without end; choose a connected topology"
            )


def steps_to_mix(topology: Topology, every: int = 1) -> float:
    """Return the number of steps in which a schedule with one exchange every ``every`` steps mixes, to three digits.

    The rounding makes ranks compute the same number whatever their processors round. A periodic schedule that is not
    exact takes at least a period, because until then some ranks have not exchanged anything.
    """
    rounds: float | None = known_exact_after(topology)
    if rounds is None:
        rate = consensus_rate(topology)
        rounds = max(topology.period or 1, -1 / math.log(rate) if rate > 0 else 1)
    return float(f"{max(1.0, rounds) * every:.3g}")
