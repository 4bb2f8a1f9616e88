"""What an algorithm is: when a rank combines its values with what it got, how, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import networkx as nx
import torch
from torch.optim import Optimizer

from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.compression.codec import Compression
from topologies import Round, Topology
from topologies.analysis.static_rounds import check_static, is_exact_in_every_round, only_graph

VALUES = "values"
"""The channel of the values themselves."""

Resized = Literal["mean", "zero"]
"""What a new world makes of a state: the mean over the old ranks at every rank, or zeros, as at the beginning."""


class Requires(NamedTuple):
    """What an algorithm needs of a topology's matrices W.

    Attributes
    ----------
    stochastic : str
        "doubly": rows and columns sum to 1; "column": columns at least; "row": rows at least.
    static, symmetric, tree : bool
        Whether W must be the same in every exchange, and W[i, j] = W[j, i], along the edges of a spanning tree.
    exact : bool
        Whether every exchange must be the exact average, W[i, j] = 1/n.
    prompt : bool
        Whether an exchange must deliver all of a difference: compressions that leave a part of it to later exchanges
        are refused.
    """

    stochastic: Literal["doubly", "row", "column"] = "doubly"
    static: bool = False
    symmetric: bool = False
    exact: bool = False
    prompt: bool = False
    tree: bool = False

    def check(self, topology: Topology, algorithm: str) -> None:
        """Refuse a topology that does not have it.

        Raises
        ------
        ValueError
            Says what it lacks, and what to choose.
        """
        if topology.stochasticity not in ("doubly", self.stochastic):
            remedy = (
                'choose doubly stochastic weights (weights="metropolis" for an undirected graph)'
                + ', or algorithm="push_sum", which corrects for it' * (topology.stochasticity == "column")
            )
            raise ValueError(
                f"topology {topology.name!r} is only {topology.stochasticity}-stochastic: averages would be biased; "
                f"{remedy}"
            )
        if self.static:
            instead = "integral_correction, whose gains follow the schedule"
            check_static(topology, f"algorithm {algorithm}", instead, symmetric=self.symmetric)
        if self.tree and not nx.is_tree(only_graph(topology)):
            raise ValueError(
                f"topology {topology.name!r} is no tree, along which algorithm {algorithm} relays; choose "
                'topology="path" or "star", or another tree with topologies.Topology.from_graph(...)'
            )
        if self.exact and not is_exact_in_every_round(topology):
            raise ValueError(
                f"topology {topology.name!r} does not average over all ranks in every exchange, which algorithm "
                f'{algorithm} builds on; choose topology="complete"'
            )


class Algorithm:
    r"""How updates and exchanges follow each other. The base holds what all of them share: gossip itself.

    In every step a bucket goes through one order, at a rank and on virtual workers alike:

    1. what has arrived is combined: :meth:`arrive` (before the next forward pass already if ``before_forward``);
    2. :meth:`gradient` may put something in the gradient's place, which has been clipped and is finite;
    3. the optimizer updates, and :meth:`updated` is called;
    4. :meth:`message` says what is sent.

    A message is what a rank has sent, :math:`m_i`. When the messages of a round have arrived, they are combined into
    the values as they are then:

    .. math:: x_i \mathrel{+}= \sum_j W[i,j]\, m_j - m_i

    With values that were not edited since the message left this is :math:`x_i \leftarrow \sum_j W[i,j]\, x_j`. In this
    form the mean over ranks is kept whatever the messages lost on the way, and an edit of the values in between
    (``load_state_dict``, a clamp) survives.

    All tensors may have leading dimensions, which are workers: see :class:`BucketView`. Hooks change them in place.

    Attributes
    ----------
    requires : Requires
        Of the topology.
    sends : tuple of str
        The channels of an exchange, tensors like the values: :meth:`message` has one for each. Each has a codec of its
        own. The first of them is "values".
    numbers : tuple of str
        Scalars that travel with a bucket's messages, never compressed: entries of ``BucketView.numbers``.
    keeps : mapping of str to str
        The tensors in ``BucketView.kept``, and what a change of world size makes of each: "mean" or "zero". Sums
        over ranks that an algorithm relies on survive both. They are saved in checkpoints by the parameters' names.
    before_forward : bool
        Whether the messages of a step must be combined before the next forward pass reads the parameters; else they
        are when the same parameters are updated next.
    directs : bool
        Whether :meth:`gradient` is to be called: a flat gradient is built only then.
    remembers_before : bool
        Whether :meth:`updated` wants ``BucketView.before``, a copy of the values before the update.
    follows_learning_rate : bool
        Whether the hooks read :attr:`BucketView.learning_rate`.
    overlap : int
        By how many steps the messages of a step may be late where they are not needed before the forward pass: those of
        step t are combined when the same parameters are updated in step t + ``overlap``. A bucket's next exchange must
        not come before.
    is_asynchronous : bool
        Whether ranks do not make their steps together: see :class:`gossip.Asynchronous`.
    steps_alone : bool
        Whether :meth:`arrive` is called, with differences of zero, at a rank too that has no peer in a round in which
        others have.
    reads_sent : bool
        Whether :meth:`arrive` is to be told what its rank's own messages were, as peers have decoded them.
    weighs_by : str or None
        The number by which a rank's values are weighted in a mean over ranks; None: all alike.
    """

    requires: ClassVar[Requires] = Requires()
    sends: ClassVar[tuple[str, ...]] = (VALUES,)
    numbers: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[Mapping[str, Resized]] = {}
    before_forward: bool = False
    overlap: int = 1
    is_asynchronous: ClassVar[bool] = False
    steps_alone: ClassVar[bool] = False
    reads_sent: ClassVar[bool] = False
    directs: ClassVar[bool] = False
    remembers_before: ClassVar[bool] = False
    follows_learning_rate: ClassVar[bool] = False
    weighs_by: ClassVar[str | None] = None

    def on(self, topology: Topology, delivers: float = 1.0) -> Algorithm:
        """The algorithm with what it takes from the topology, which meets ``requires``; by default itself.

        Parameters
        ----------
        topology : Topology
        delivers : float
            The share of a difference that an exchange delivers: ``gossip.Compression.delivers``.

        Raises
        ------
        ValueError
            The topology has not what it needs; says what to choose.
        """
        del topology, delivers
        return self

    def schedule(self, topology: Topology) -> Topology:
        """The rounds that steps end with, round t that of step t; by default those of the topology."""
        return topology

    @property
    def messages_per_edge(self) -> int:
        """How many messages like the values a bucket's exchange sends along an edge; scalars are not counted."""
        return len(self.sends)

    @property
    def compression(self) -> Compression | None:
        """How its messages are encoded, if that belongs to the algorithm; None: as whoever trains chooses."""
        return None

    def is_exchanged(self, bucket: int, step: int) -> bool:
        """Whether bucket number ``bucket`` is exchanged after step ``step``, if its round exchanges; by default all."""
        del bucket, step
        return True

    def channel_round(self, channel: str, round_: Round) -> Round:
        """Along which edges a channel is sent in a round, with which weights; by default the round itself.

        Its edges must be some of the round's.
        """
        del channel
        return round_

    def check_optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Refuse optimizers that the algorithm cannot work with.

        Raises
        ------
        ValueError
            Says why, and what to do.
        """

    def begin(self, bucket: BucketView) -> None:
        """Fill ``bucket.kept`` and ``bucket.numbers``: at the beginning, and where a training begins anew."""
        bucket.kept.update({name: bucket.zeros() for name in self.keeps})
        ones = torch.ones(*bucket.values.shape[:-1], 1, dtype=torch.float64, device=bucket.values.device)
        bucket.numbers.update({name: ones.clone() for name in self.numbers})

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        """Combine what has arrived.

        With one channel it is called part by part, with a view of a part of the bucket each time; with several once.

        Parameters
        ----------
        bucket : BucketView
            Its ``round_index`` is that of the round in which the messages were sent.
        got : mapping of str to Arrived
            By channel and number.
        """
        self.combine_(bucket.values, got[VALUES].difference, bucket.round_index)

    def combine_(self, values: torch.Tensor, difference: torch.Tensor, round_index: int) -> None:
        r"""Mix what arrived into ``values``, in place: parameters, and buffers that are averaged.

        Parameters
        ----------
        values : Tensor, [..., numel]
        difference : Tensor, [..., numel]
            :math:`\sum_j W[i,j] m_j - m_i`, in the dtype of accumulation; used up as scratch.
        round_index : int
        """
        del round_index
        add_(values, difference)

    def gradient(self, bucket: BucketView, gradient: torch.Tensor) -> torch.Tensor:
        """What the optimizer is to get in the gradient's place, [..., numel]; with ``directs`` alone.

        It is not called where the update is skipped: without a gradient, or with one that is not finite.

        Parameters
        ----------
        bucket : BucketView
        gradient : Tensor, [..., numel]
            In the dtype of accumulation.
        """
        del bucket
        return gradient

    def updated(self, bucket: BucketView) -> None:
        """Called after the optimizer's update, skipped ones included: like an update by zero."""

    def averaged(self, bucket: BucketView) -> None:
        """Called when ``global_avg()`` has made the values the mean over ranks, and nothing is in flight."""

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        """What is sent, by channel: tensors like the values, which are encoded before anything else happens."""
        return {VALUES: bucket.values}

    def follow(self, before: Algorithm) -> None:
        """Take over what was set on an algorithm of the same class, in whose place this one comes; by default nothing.

        The ranks are others, and with them the topology: what depends on it stays.
        """
        del before

    def describe(self) -> str:
        """Name and constants, to be compared between ranks."""
        return type(self).__name__


def add_(values: torch.Tensor, difference: torch.Tensor, factor: float = 1.0) -> None:
    """Add ``factor`` times a difference, which is used up, in the wider dtype of the two."""
    if values.dtype == difference.dtype:
        values.add_(difference, alpha=factor)
    else:
        values.copy_(difference.mul_(factor).add_(values))
