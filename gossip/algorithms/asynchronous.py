"""Pairs of ranks that average whenever one of them is ready (AD-PSGD), so that no rank waits for a slow one."""

from functools import partial

import numpy as np

from gossip.algorithms.base import Algorithm
from topologies import Round, Topology
from topologies.graphs.edge_colouring import edge_colouring
from topologies.validation import check_integer


class Asynchronous(Algorithm):
    r"""After each of its steps a rank averages with one other rank, without waiting for that rank's step: AD-PSGD.

    With :math:`u_i` the optimizer's update at rank i, computed from the gradient at the values that i had before, and j
    the partner that i averages with after its step:

    .. math:: x_i \leftarrow x_i + u_i, \qquad (x_i, x_j) \leftarrow \tfrac{1}{2} (x_i + x_j,\; x_i + x_j)

    Each rank counts its own steps. The values that it shows to others for a bucket are those after its newest update,
    with all averages since; a partner's values are changed by any rank that asks it, at any time, concurrently with its
    computation. An average is made by two ranks over a whole bucket. It enters i's parameters just before their next
    update, never between two reads of one forward and backward pass: a gradient may be applied to values that averages
    have changed since it was computed, but it is never computed from a mixture of old and new values. What one rank
    adds the other subtracts, so the mean over ranks is kept exactly. ``gossip.exchange.pair_averaging`` states
    how long a bucket is locked.

    Sends one message per step, and one to each rank that asks; of two ranks that ask each other at the same time, each
    sends one. Keeps two copies of the values. The topology serves as a graph: its rounds are split into pairs, which
    take turns and have weight 1/2. Requires ``on_peer_loss="continue"``, whose connections do not need both ranks to
    call at the same time. Where all ranks are equally fast this is D-PSGD on those pairs, which is what virtual workers
    compute.

    Use it where ranks differ in speed, or each is slow at times. Where they do not, all ranks of a round average
    together, which mixes faster: choose "adapt_while_communicating".

    Parameters
    ----------
    max_staleness : int
        The number of steps, at least 1, after which a rank waits for an average that it asked for, if it has not
        arrived by then.

    References
    ----------
    Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018.
    """

    unclipped_because = "has no rounds whose two ends could clip alike"
    is_asynchronous = True
    _constants = ("max_staleness",)

    def __init__(self, max_staleness: int = 2) -> None:
        self.max_staleness = check_integer("max_staleness", max_staleness, minimum=1)

    def schedule(self, topology: Topology) -> Topology:
        """Return the topology with each round split into rounds of pairs that average with weights of 1/2."""
        name = f"{topology.name} in pairs"
        if topology.period is None:
            return Topology.from_function(partial(_pairs_of, topology), name=name)
        warmup, repeated = (
            [pairs for t in rounds for pairs in _split(topology.round(t))]
            for rounds in (range(topology.warmup), range(topology.warmup, topology.warmup + topology.period))
        )
        schedule = Topology.from_rounds(repeated, name=name)
        return Topology.from_rounds(warmup, name=name).then(schedule, after=len(warmup)) if warmup else schedule

    def steps_alone(self, step: int, round_: Round) -> bool:
        del step
        return not round_.is_identity


def _split(round_: Round) -> list[Round]:
    """Split a round into rounds of pairs along its edges, each edge in one of them; a local step stays one."""
    targets, sources, _ = round_.edges()
    matchings = edge_colouring(np.stack((targets, sources), axis=1))
    pairs = [Round.from_groups(round_.world_size, matching.tolist()) for matching in matchings]
    return pairs or [Round.identity(round_.world_size)]


def _pairs_of(topology: Topology, t: int) -> Round:
    pairs = _split(topology.round(t))
    if len(pairs) > 1:
        raise ValueError(
            f"topology {topology.name!r} has rounds that never repeat, in which a rank has several peers, and cannot "
            'be split into pairs; choose "random_matching", or a topology whose rounds repeat'
        )
    return pairs[0]
