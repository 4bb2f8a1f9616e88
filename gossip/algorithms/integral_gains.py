"""The gains of an integral correction, derived from how fast a topology mixes."""

from __future__ import annotations

import math
from typing import NamedTuple

from gossip.algorithms.base import Form
from topologies import Topology
from topologies.analysis import connected, consensus_rate
from topologies.analysis.exactness import known_exact_after
from topologies.analysis.static_rounds import is_static_and_symmetric

_OF_STATIC = 0.5


class Gains(NamedTuple):
    """The factors by which an exchange enters the values and the correction, from a round on."""

    start: int
    gamma: float
    kappa: float


def gains_on(
    topology: Topology, form: Form, gamma: float | None, kappa: float | None, delivers: float, *, takes_textbook: bool
) -> tuple[Gains, ...]:
    r"""Return the gains of each phase of a schedule; arguments that are not None take precedence.

    With ``takes_textbook`` they are the textbook's on a static symmetric W, 1/2 and 1/2. On any other schedule
    :math:`\kappa = 1 / (2 \tau)` for adapt then combine and :math:`1 / (4 \tau)` for adapt while communicating, where
    :math:`\tau` is the number of steps in which the schedule mixes, at least 1, and :math:`\gamma = 1 - \kappa / 2`.
    With an exchange every k steps the correction is applied k times as often as it grows, so :math:`\kappa` is divided
    by k. If an exchange delivers only a share of a difference, :math:`\kappa` is multiplied by that share.
    """
    if topology.world_size == 1:
        return (Gains(0, 1.0, 0.0),)
    gains = []
    for phase in topology.phases:
        if phase.topology.period is not None and not connected(phase.topology):
            raise ValueError(
                f"topology {topology.name!r} never brings all ranks together: an integral correction would grow "
                "without end; choose a connected topology"
            )
        if takes_textbook and is_static_and_symmetric(phase.topology):
            own_gamma, own_kappa = _OF_STATIC, _OF_STATIC * delivers / phase.every
        else:
            own_kappa = delivers / ((2 if form == "atc" else 4) * steps_to_mix(phase.topology, phase.every))
            own_gamma = 1 - (own_kappa if kappa is None else kappa) / 2
        chosen = own_gamma if gamma is None else gamma, own_kappa if kappa is None else kappa
        gains.append(Gains(phase.start, *chosen))
    return tuple(gains)


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
