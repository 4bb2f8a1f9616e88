"""A topology: a schedule of rounds with everything that can be asked of it and made of it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from topologies import compositions, other_sizes, placement
from topologies.analysis.description import Description, describe
from topologies.analysis.exactness import known_exact_after
from topologies.family_registry import build_family
from topologies.graphs.graph_files import read_graph
from topologies.schedule import Schedule
from topologies.serialization import from_dict, to_dict

if TYPE_CHECKING:
    import networkx as nx


class Topology(Schedule):
    """A schedule of rounds for ``world_size`` ranks; round t follows from t alone, on every rank alike.

    Use :func:`topologies.build` for a registered family, or :meth:`from_graph`, :meth:`Schedule.from_rounds` and
    :meth:`Schedule.from_function` for one of your own. The constructor, see :class:`Schedule`, is for families.

    Examples
    --------
    >>> import topologies
    >>> ring = topologies.build("ring", 8)
    >>> ring.round(3).neighbours(0)
    {1: 0.3333333333333333, 7: 0.3333333333333333}
    """

    @classmethod
    def from_graph(
        cls, graph: nx.Graph | str | os.PathLike[str] | Mapping[str, Any], weights: str = "metropolis"
    ) -> Topology:
        """Return the topology that exchanges along a graph in every round.

        The graph is a networkx graph, node-link data or a file. The same as ``build("graph", n, graph=graph,
        weights=weights)`` for a graph of n nodes, see ``topologies.families.given_graph.graph``.
        """
        graph = read_graph(graph)
        return build_family(cls, "graph", len(graph), graph=graph, weights=weights)

    def every(self, k: int) -> Topology:
        """Return the schedule with k - 1 local steps before each exchange.

        Round s of this topology is round ``k (s + 1) - 1`` of the result: rounds k - 1, 2 k - 1, ... exchange, all
        others are the identity. Warm-up, period and the rounds until all is exact are k times as long. For k = 1,
        and for a single rank, it is the topology itself.

        Parameters
        ----------
        k
            Exchange in every k-th round only; at least 1.

        Raises
        ------
        ValueError, TypeError
            If k is not an integer of at least 1.

        Examples
        --------
        >>> import topologies
        >>> local_sgd = topologies.build("complete", 4).every(3)
        >>> [local_sgd.round(t).is_identity for t in range(6)]
        [True, True, False, True, True, False]
        """
        return compositions.every(self, k)

    def then(self, other: Topology, *, after: int) -> Topology:
        """Return the schedule of this topology for some rounds, and of another one from then on.

        Round t is round t of this topology for ``t < after``, and round ``t - after`` of ``other`` from there on.
        The first ``after`` rounds are a warm-up: period and exactness are those of ``other``. For ``after=0``, and
        for a single rank, it is ``other`` itself.

        Parameters
        ----------
        other
            A topology of as many ranks.
        after
            How many rounds this topology runs; at least 0.

        Raises
        ------
        ValueError
            If ``after`` is negative, the world sizes differ, or one of the two is row- and the other one
            column-stochastic.
        TypeError
            If ``other`` is no topology or ``after`` no integer.

        Examples
        --------
        All-reduce for 100 rounds, then a ring:

        >>> import topologies
        >>> topologies.build("complete", 8).then(topologies.build("ring", 8), after=100)
        Topology('complete.then(ring, after=100)', world_size=8, warmup=100, period=1)
        """
        return compositions.then(self, other, after)

    def interleave(self, other: Topology) -> Topology:
        """Return the schedule in which this topology and another one take turns.

        Round 2 s is round s of this topology, round 2 s + 1 round s of ``other``. The period is twice the least
        common multiple of both. It takes a topology of as many ranks; neither of the two may have a warm-up.

        Raises
        ------
        ValueError
            If the world sizes differ, one has a warm-up, or one is row- and the other column-stochastic.
        TypeError
            If ``other`` is no topology.

        Examples
        --------
        >>> import topologies
        >>> rings = topologies.build("one_peer_ring", 8).interleave(topologies.build("one_peer_hypercube", 8))
        >>> rings.period, rings.round(3).neighbours(0)
        (12, {2: 0.5})
        """
        return compositions.interleave(self, other)

    def resized(self, world_size: int) -> Topology:
        """Return the same topology for another number of ranks: each family that it is made of, with its options.

        Raises
        ------
        ValueError
            If a family, or its options, cannot serve that size, or it was made for its own ranks: by rounds, as a
            product or permuted.

        Examples
        --------
        >>> import topologies
        >>> topologies.build("one_peer_exponential", 8).every(2).resized(5).name
        'one_peer_exponential.every(2)'
        """
        return other_sizes.resized(self, world_size)

    def averaged_every(self, k: int) -> Topology:
        """Return the schedule in which all ranks average in every k-th round.

        Rounds k - 1, 2 k - 1, ... are the exact average, W = J; round t is round t of this topology for all others.
        The period of a part that repeats becomes the least common multiple of its own and k. A schedule whose rounds
        k - 1, 2 k - 1, ... are such averages already is returned as it is, as for a single rank.

        Parameters
        ----------
        k
            At least 1.

        Raises
        ------
        ValueError, TypeError
            If k is not an integer of at least 1.

        References
        ----------
        Chen et al., "Accelerating gossip SGD with periodic global averaging", ICML 2021.

        Examples
        --------
        >>> import topologies
        >>> ring = topologies.build("ring", 6).averaged_every(4)
        >>> [ring.round(t).uniform_groups is not None for t in range(8)], ring.exact_after
        ([False, False, False, True, False, False, False, True], 4)
        """
        return compositions.averaged_every(self, k)

    def product(self, local: Topology) -> Topology:
        """Return the Kronecker product: this topology between machines, ``local`` between the ranks of each.

        Rank ``machine * local.world_size + place`` reads rank ``other * local.world_size + there`` with the weight
        ``W[machine, other] * local W[place, there]`` of round t of both. The period is the least common multiple;
        exact once both are. Neither of the two may have a warm-up.

        Raises
        ------
        ValueError
            If one has a warm-up, or one is row- and the other column-stochastic.
        TypeError
            If ``local`` is no topology.

        Examples
        --------
        Three machines in a ring; the two ranks of each work as one:

        >>> import topologies
        >>> topology = topologies.build("ring", 3).product(topologies.build("complete", 2))
        >>> topology.world_size, topology.round(0).self_weight(0)
        (6, 0.16666666666666666)
        """
        return placement.product(self, local)

    def permuted(self, order: Sequence[int]) -> Topology:
        """Return the same schedule with the ranks in other places.

        Parameters
        ----------
        order
            Rank ``order[place]`` does what rank ``place`` does in this topology: for a ring, the order in which it
            passes the ranks.

        Raises
        ------
        ValueError, TypeError
            If ``order`` does not name every rank once.

        Examples
        --------
        >>> import topologies
        >>> topologies.build("ring", 4).permuted([0, 2, 1, 3]).round(0).peers(0)
        (2, 3)
        """
        return compositions.permuted(self, order)

    @property
    def exact_after(self) -> int | None:
        """After how many rounds from a period boundary all ranks hold exactly the mean; ``None``: never.

        Promised by the family, or else measured for a schedule with a period, see ``topologies.analysis``.
        """
        return known_exact_after(self)

    def describe(self) -> Description:
        """Return what can be measured of the topology: ``str()`` is one page of text, ``.to_dict()`` plain JSON."""
        return describe(self)

    def to_json(self) -> str:
        """Return the topology as JSON: name, size and options of a registered one, the phases of a composed one.

        Any other is written as its rounds.

        Raises
        ------
        ValueError
            For a schedule from a function without a period: it has no end to write down.
        """
        return json.dumps(to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Return the topology that :meth:`to_json` wrote.

        Raises
        ------
        ValueError
            If the text is not such JSON, or the family is not registered.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"text is not JSON ({error}); pass what Topology.to_json() returned") from None
        return from_dict(cls, data)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle a registered topology by name and options, any other one by its rounds or its phases."""
        if not self.registered:
            return super().__reduce__()
        return functools.partial(build_family, type(self), self.name, self.world_size, **self.options), ()
