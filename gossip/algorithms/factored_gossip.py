"""Factored gossip: every rank makes outer steps of its own, and anchors are mixed beside the next local steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from gossip.algorithms.base import VALUES, Form, Kept, add_
from gossip.algorithms.bucket_view import Arrived, BucketView, scaled
from gossip.algorithms.integral_correction import CORRECTION, check_connected, steps_to_mix
from gossip.algorithms.outer_steps import ANCHOR, Nesterov, OuterFactory, OuterSteps
from topologies import Topology
from topologies.compositions import in_bursts
from topologies.validation import check_integer, check_real


class FactoredGossip(OuterSteps):
    r"""DiLoCo whose outer steps are each rank's own, while anchors are mixed as plain gossip would mix values.

    A rank starts from its own anchor :math:`a_i` and makes H steps with its own optimizer, which end at :math:`x_i`.
    Then, with the outer rate :math:`\alpha` and the outer momentum :math:`\mu`:

    .. math::
        \Delta_i = a_i - x_i, \qquad v_i \leftarrow \mu\, v_i + \Delta_i, \qquad
        u_i = -\alpha\, (\Delta_i + \mu\, v_i)

    Anchors are then mixed, in R rounds of the topology, of which each moves a rank's anchor and its values alike,
    whatever local steps it has made meanwhile:

    .. math::
        a_i \leftarrow a_i + u_i, \quad x_i \leftarrow a_i, \qquad \text{R times}\quad
        d_i = \sum_j W_{ij}\, a_j - a_i, \quad a_i \leftarrow a_i + d_i, \quad x_i \leftarrow x_i + d_i

    Since an anchor does not change but by mixing, nothing that is mixed is stale. In the form "awc" the messages of a
    round are on their way during ``overlap`` local steps, and the next round follows; in "atc" they are awaited before
    the next forward pass, so that the rounds are one local step apart. Outer step s is followed by the R rounds from
    (s + 1) R - 1 on. On "complete" the form "atc" is DiLoCo: only the velocities differ between ranks, and their mean
    is DiLoCo's.

    Local steps that are made before anchors are mixed begin where ranks differ, which costs much where data do. Choose
    ``overlap`` as small as the links allow, and a topology that is exact after few rounds: "one_peer_exponential" takes
    three on 8 ranks, and "hyper_hypercube" with k=3 takes two on 16.

    Where data differ, ``kappa`` = :math:`\kappa` > 0 takes the lasting part of that away, and the drift of local steps
    with it: as in :class:`IntegralCorrection`, what mixing moves an anchor is added up to a correction :math:`c_i`,
    which is a part of each local step, and follows the learning rate :math:`\eta`.

    .. math::
        c_i \leftarrow c_i + \frac{\kappa}{\tau}\, d_i \quad \text{on arrival}, \qquad
        c_i \leftarrow \frac{\eta(t)}{\eta(t-1)}\, c_i, \quad x_i \leftarrow x_i + c_i / H \quad \text{in local step } t

    Here :math:`\tau` is the number of outer steps in which the topology mixes, at least 1. As :math:`\sum_i c_i = 0`,
    where replicas agree and no step of SGD moves them, the gradients of all ranks cancel: unlike DiLoCo's, that point
    is the optimum of the average objective. Begin with 0.2 to 0.4; the noise of gradients enters the correction in
    proportion to it, and short trainings at high rates bear less. A correction grows at most tenfold in a step: where
    the rate starts again from nearly 0, so does the correction.

    Sends R messages every H steps, and keeps two tensors per bucket, three with a correction. Works with any doubly
    stochastic W. Use it where links are too slow for a message per step, and no collective over all ranks is reliable.

    Parameters
    ----------
    period : int
        H, the number of steps from one outer step to the next, at least 1.
    outer_lr : float
        The outer rate, above 0.
    outer_momentum : float
        The outer momentum, at least 0 and below 1.
    form : str
        "awc": mixed beside the next local steps; "atc": awaited before the next forward pass.
    outer : callable, optional
        The outer optimizer in place of this one, as for :class:`DiLoCo`, with the gradient :math:`\Delta_i`.
    rounds : int
        R, at least 1.
    overlap : int
        The number of steps that the messages of a round have to arrive in the form "awc", at least 1. All rounds must
        fit into H.
    kappa : float
        The gain of the correction, from 0, which makes none, to 1; ``gain`` is what is left of it on the topology.

    References
    ----------
    Hewa Koneputugodage et al., 2026, arXiv 2606.22768. The correction is this project's own; one within local steps,
    from gradients that a server averages, is that of Karimireddy et al., "SCAFFOLD", ICML 2020.
    """

    _constants: tuple[str, ...] = ("period", "rounds", "overlap", "outer_lr", "outer_momentum")
    follows_learning_rate = True

    def __init__(
        self,
        period: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        form: Form = "awc",
        outer: OuterFactory | None = None,
        rounds: int = 1,
        overlap: int = 1,
        kappa: float = 0.0,
    ) -> None:
        super().__init__(period, form, outer_lr, outer_momentum)
        self.rounds = check_integer("rounds", rounds, minimum=1)
        self.overlap = check_integer("overlap", overlap, minimum=1)
        if form == "atc" and overlap > 1:
            raise ValueError(f'overlap={overlap}: form="atc" awaits messages before the next forward pass; pass 1')
        if rounds * overlap > period:
            raise ValueError(
                f"rounds={rounds} of overlap={overlap} steps take more than the {period} steps of a period; reduce them"
            )
        own = Nesterov(self.outer_lr, self.outer_momentum)
        self._step_by(outer, own, "own", outer_lr=outer_lr, outer_momentum=outer_momentum)
        self.kappa = check_real("kappa", kappa, "between 0 and 1", example=0.3)
        if kappa:
            self.keeps = {**self.keeps, CORRECTION: Kept("zero")}
            self._constants = (*self._constants, "kappa")
        self.gain = self.kappa

    def on(self, topology: Topology, delivers: float = 1.0) -> FactoredGossip:
        bound = copy.copy(self)
        if self.kappa and topology.world_size > 1:
            check_connected(topology)
            rounds = max(steps_to_mix(phase.topology, phase.every) for phase in topology.phases)
            bound.gain = self.kappa * delivers / max(1.0, rounds / self.rounds)
        return bound

    def schedule(self, topology: Topology) -> Topology:
        return in_bursts(topology, self.period, self.rounds, self.overlap)

    def is_exchanged(self, bucket: int, step: int) -> bool:
        del bucket
        return step + 1 >= self.period  # before, all anchors are equal

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        return {VALUES: bucket.kept[ANCHOR].to(bucket.values.dtype)}

    def updated(self, bucket: BucketView) -> None:
        if self.kappa:
            correction = bucket.kept[CORRECTION].mul_(bucket.learning_rate_growth)
            bucket.values.add_(scaled(correction, bucket.is_moving).to(bucket.values.dtype), alpha=1 / self.period)
        if self._ends_period(bucket.round_index):
            anchor = bucket.kept[ANCHOR]
            self._outer.step_(bucket, anchor - bucket.values)
            bucket.values.copy_(anchor)

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        difference = got[VALUES].difference
        bucket.kept[ANCHOR].add_(difference)
        if self.kappa:
            bucket.kept[CORRECTION].add_(difference, alpha=self.gain)
        add_(bucket.values, difference)
