"""Pairs of ranks that average whenever one of them is ready (AD-PSGD): nobody waits for a slow one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import networkx as nx
import numpy as np

from gossip.algorithms.base import Algorithm
from topologies import Round, Topology
from topologies.graphs.edge_colouring import edge_colouring
from topologies.validation import check_integer


class Average(NamedTuple):
    """An average that a rank has made with another one, of what both showed then.

    Attributes
    ----------
    rank : int
    step : int
        The newest one of this rank's whose values it showed.
    bucket : int
    partner : int
    partner_step : int
        The same of the partner.
    entered : int
        The step of this rank's before whose update it entered the parameters.
    is_read : bool
        Whether that step's gradient was taken with it: it entered between two steps, as all ranks did something
        together.
    """

    rank: int
    step: int
    bucket: int
    partner: int
    partner_step: int
    entered: int = -1
    is_read: bool = False


class Recording(NamedTuple):
    """What the ranks of a run have done.

    Attributes
    ----------
    averages : sequence of Average
        Of all ranks; those of a rank and a bucket in the order in which they were made.
    num_steps : sequence of int
        How many each rank has made.
    """

    averages: Sequence[Average]
    num_steps: Sequence[int]


class Asynchronous(Algorithm):
    r"""A rank averages with one other rank after each of its steps, without waiting for that rank's: AD-PSGD.

    With :math:`u_i` the optimizer's update at rank i, computed from the gradient at the values that i had before, and j
    the rank that i meets after its step:

    .. math:: x_i \leftarrow x_i + u_i, \qquad (x_i, x_j) \leftarrow \tfrac12 (x_i + x_j,\; x_i + x_j)

    Each rank counts its own steps. What it shows the others of a bucket are its values after its newest update, with
    all averages since; j's are changed by whoever asks it, at any time, beside its computing. An average is one of two
    ranks and of all of a bucket, and enters i's parameters just before their next update, between two reads of the
    forward and backward pass: a gradient is applied to values that may have changed by averages since it was taken,
    never to a mixture of old and new ones. What one rank adds the other takes away, so that the mean over ranks is
    exact; how long a bucket is locked is told in
    ``gossip.communication.survivors.averager``.

    Sends one message per step, and one for each rank that asks; of two that ask each other at the same time, each sends
    one. Keeps two copies of the values. A topology serves as a graph: its rounds are split into pairs, which take
    turns, and weigh 1/2. Needs ``on_peer_loss="continue"``, whose connections do not need two ranks to call at the same
    time. Where all ranks are equally fast it is D-PSGD on those pairs, which is what virtual workers compute.

    Use it where ranks are unequally fast, or each is slow at times. Where they are not, all of a round average
    together, which mixes faster: choose "adapt_while_communicating".

    Parameters
    ----------
    max_staleness : int
        An average that a rank has asked for is waited for so many steps later, if it has not come by then; at least 1.
    history : list, optional
        Each rank adds its averages, as :class:`Average`, when they enter its parameters; those of a bucket in the order
        in which they were made. Together with the updates the histories of all ranks determine all values.
    replay : Recording, optional
        Of :class:`gossip.VirtualWorkers`: what was recorded so, or :func:`gossip.simulate_averages` predicts, is done
        again, each replica at its own pace.

    References
    ----------
    Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018.
    """

    steps_alone = True
    is_asynchronous = True

    def __init__(
        self, max_staleness: int = 2, history: list[Average] | None = None, replay: Recording | None = None
    ) -> None:
        self.max_staleness = check_integer("max_staleness", max_staleness, minimum=1)
        self.history = history
        self.replay = replay

    def schedule(self, topology: Topology) -> Topology:
        return in_pairs(topology)

    def describe(self) -> str:
        return f"{type(self).__name__}(max_staleness={self.max_staleness})"


def in_pairs(topology: Topology) -> Topology:
    """The rounds of a topology, each split into rounds of pairs that average, with weights of 1/2.

    Raises
    ------
    ValueError
        Its rounds never repeat, and are no pairs.
    """
    name = f"{topology.name} in pairs"
    if topology.period is None:
        return Topology.from_function(partial(_pairs_of, topology), name=name)
    warmup, repeated = (
        [pairs for t in rounds for pairs in _split(topology.round(t))]
        for rounds in (range(topology.warmup), range(topology.warmup, topology.warmup + topology.period))
    )
    schedule = Topology.from_rounds(repeated, name=name)
    return Topology.from_rounds(warmup, name=name).then(schedule, after=len(warmup)) if warmup else schedule


def _split(round_: Round) -> list[Round]:
    """Rounds of pairs along the edges of one, each edge in one of them; local steps stay."""
    matchings = edge_colouring(_edges(round_))
    pairs = [Round.from_groups(round_.world_size, matching.tolist()) for matching in matchings]
    return pairs or [Round.identity(round_.world_size)]


def _pairs_of(topology: Topology, t: int) -> Round:
    round_ = topology.round(t)
    pairs = _split(round_)
    if len(pairs) > 1:
        raise ValueError(
            f"topology {topology.name!r} has rounds that never repeat, in which a rank has several peers: they cannot "
            'be split into pairs; choose "random_matching", or a topology whose rounds repeat'
        )
    return pairs[0]


def _edges(round_: Round) -> nx.Graph:
    targets, sources, _ = round_.edges()
    graph = nx.Graph()
    graph.add_edges_from(np.stack([targets, sources], axis=1).tolist())
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph
