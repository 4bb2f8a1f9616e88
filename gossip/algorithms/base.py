"""The base class of algorithms: when and how a rank combines its values with what it received, and what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import networkx as nx
import torch
from torch.optim import SGD, Optimizer

from gossip.algorithms.bucket_view import Arrived, BucketView
from gossip.compression.codec import Compression
from gossip.errors import GossipError
from topologies import Round, Topology
from topologies.analysis.static_rounds import check_static, is_exact_in_every_round, only_graph
from topologies.validation import check_real

VALUES = "values"
"""The channel of the values themselves."""
Form = Literal["awc", "atc"]
"""Adapt while communicating: messages are awaited at the next update. Adapt then combine: before the next forward pass.
"""


class Kept(NamedTuple):
    """What becomes of a tensor that an algorithm keeps when other ranks train than before.

    Attributes
    ----------
    resized : str
        What every rank starts with from a checkpoint of another number of ranks: "mean", the mean over the old ranks,
        or "zero". Both keep the sums over ranks that an algorithm relies on.
    scope : str
        What becomes of it when ranks are lost, leave or join during training. "joint": it only means something together
        with that of the same other ranks, such as trackers and corrections, whose sum over ranks is known; all ranks
        begin it anew. "own": it belongs to the values of its rank, such as error feedback; the rank keeps it, and one
        that joins takes over its source's along with the values. "common": it is equal on all ranks by definition, such
        as the anchor and the velocity of outer steps; it is kept and taken over too, and if an exchange that was to be
        exact has left it different on different ranks, all get the mean.
    """

    resized: Literal["mean", "zero"]
    scope: Literal["joint", "own", "common"] = "joint"


class Requires(NamedTuple):
    """The requirements of an algorithm for a topology's matrices W.

    Attributes
    ----------
    stochastic : str
        "doubly": rows and columns sum to 1; "column": at least the columns do; "row": at least the rows do.
    static, symmetric, tree : bool
        Whether W must be the same in every exchange, W[i, j] = W[j, i], and the edges a spanning tree, respectively.
    exact : bool
        Whether every exchange must be the exact average, W[i, j] = 1/n.
    prompt : bool
        Whether an exchange must deliver the whole difference: compressions that leave a part of it to later exchanges
        are refused.
    """

    stochastic: Literal["doubly", "row", "column"] = "doubly"
    static: bool = False
    symmetric: bool = False
    exact: bool = False
    prompt: bool = False
    tree: bool = False

    def check(self, topology: Topology, algorithm: str) -> None:
        """Raise ValueError if a topology lacks something; the text says what, and what to choose instead."""
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
                f"topology {topology.name!r} is not a tree, along which algorithm {algorithm} relays; choose "
                'topology="path" or "star", or another tree with topologies.Topology.from_graph(...)'
            )
        if self.exact and not is_exact_in_every_round(topology):
            raise ValueError(
                f"topology {topology.name!r} does not average over all ranks in every exchange, which algorithm "
                f'{algorithm} requires; choose topology="complete"'
            )


class Algorithm:
    r"""The order and the rule of updates and exchanges. The base class holds what all algorithms share: gossip itself.

    Every step of a bucket follows one order, on a single rank and on virtual workers alike:

    1. :meth:`arrive` combines what has arrived (if ``before_forward``, already before the next forward pass);
    2. :meth:`gradient` may replace the gradient, which has been clipped and is finite;
    3. the optimizer updates, and :meth:`updated` is called;
    4. :meth:`message` returns what is sent.

    A message :math:`m_i` is what rank i has sent. When the messages of a round have arrived, they are combined into the
    values as they are then:

    .. math:: x_i \leftarrow x_i + \sum_j W[i,j]\, m_j - m_i

    If the values were not edited after the message was sent, this is :math:`x_i \leftarrow \sum_j W[i,j]\, x_j`. In
    this form the mean over ranks is kept whatever compression took from the messages, and an edit of the values in
    between (``load_state_dict``, a clamp) survives.

    A constructor refuses arguments outside of the ranges that its class states (ValueError, TypeError).

    All tensors may have leading dimensions, one entry per worker, see :class:`BucketView`. Hooks change them in place.

    Attributes
    ----------
    requires : Requires
        What the topology must satisfy.
    sends : tuple of str
        The channels of an exchange: :meth:`message` returns a tensor like the values for each. Each channel has a codec
        of its own. The first is "values".
    numbers : tuple of str
        Scalars that travel with a bucket's messages and are never compressed: entries of ``BucketView.numbers``.
    counts : tuple of str
        Scalars that stay on their rank, with what it keeps: entries of ``BucketView.numbers``, which begin with 0.
    keeps : mapping of str to Kept
        The tensors in ``BucketView.kept``, and what a change of ranks makes of each. Checkpoints save them under the
        parameters' names. A state and the counter that normalises it must begin anew together, or neither: what is
        divided by a power of the optimizer's count of updates is of scope "own", as the optimizer's state is.
    before_forward : bool
        Whether the messages of a step must be combined before the next forward pass reads the parameters; otherwise
        they are combined when the same parameters are next updated.
    directs : bool
        Whether :meth:`gradient` is called; a flat gradient is built only then.
    remembers_before : bool
        Whether :meth:`updated` needs ``BucketView.before``, a copy of the values before the update.
    follows_learning_rate : bool
        Whether the hooks read :attr:`BucketView.learning_rate`.
    overlap : int
        How many steps the messages of a step may take where they are not needed before the forward pass: those of step
        t are combined when the same parameters are updated in step t + ``overlap``. A bucket must not be exchanged
        again before that.
    is_asynchronous : bool
        Whether ranks make their steps independently of each other, see :class:`gossip.Asynchronous`.
    reads_sent : bool
        Whether :meth:`arrive` receives this rank's own messages as the peers have decoded them.
    unclipped_because : str
        Why differences must not be clipped (``max_difference``); empty if they may be.
    weighs_by : str or None
        The number that weights a rank's values in a mean over ranks; with None all ranks count equally.
    weighted : bool
        Whether ranks count by their samples, ``BucketView.samples``, see :meth:`gossip.GossipDataParallel.weigh`.
    keeps_numbers : bool
        Whether the numbers belong to the values of their rank, which keeps them when ranks are lost or join; otherwise
        all ranks begin them anew then. Counts always belong to them.
    compression : Compression or None
        The compression of its messages, if the algorithm prescribes one; None leaves the choice to the user.
    """

    requires: ClassVar[Requires] = Requires()
    sends: ClassVar[tuple[str, ...]] = (VALUES,)
    numbers: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    keeps: Mapping[str, Kept] = {}
    before_forward: bool = False
    overlap: int = 1
    is_asynchronous: ClassVar[bool] = False
    reads_sent: ClassVar[bool] = False
    directs: ClassVar[bool] = False
    remembers_before: ClassVar[bool] = False
    follows_learning_rate: ClassVar[bool] = False
    weighs_by: str | None = None
    weighted: bool = False
    keeps_numbers: ClassVar[bool] = False
    compression: Compression | None = None
    unclipped_because: ClassVar[str] = ""
    _constants: tuple[str, ...] = ()

    def _weigh(self, weighted: bool, number: str) -> None:
        """Let ranks count by their samples, which ``number`` carries, if ``weighted``."""
        if weighted:
            self.weighted, self.numbers, self.weighs_by = True, (number,), number
            self._constants = (*self._constants, "weighted")

    def check_weighted(self) -> None:
        """Raise GossipError if all ranks count equally, whatever samples they have."""
        if not self.weighted:
            raise GossipError(
                f"weigh(): algorithm {self.describe()} counts all ranks equally; to count them by their samples, pass "
                "algorithm=gossip.PushSum(weighted=True) or gossip.DiLoCo(weighted=True)"
            )

    def on(self, topology: Topology, delivers: float = 1.0) -> Algorithm:
        """Return the algorithm bound to a topology that meets ``requires``; by default the algorithm itself.

        ``delivers`` is the share of a difference that an exchange delivers, ``gossip.Compression.delivers``. Raises
        ValueError: the topology lacks what the algorithm needs besides; the text says what to choose.
        """
        del topology, delivers
        return self

    def schedule(self, topology: Topology) -> Topology:
        """Return the rounds that end the steps, round t ending step t; by default those of the topology."""
        return topology

    def messages_per_edge(self, step: int) -> int:
        """Return how many tensors like the values a bucket sends along an edge after ``step``, not counting scalars."""
        return sum(self.is_sent(channel, step) for channel in self.sends)

    def is_exchanged(self, bucket: int, step: int) -> bool:
        """Return whether ``bucket`` is exchanged after ``step``, if the round exchanges anything; by default always."""
        del bucket, step
        return True

    def steps_alone(self, step: int, round_: Round) -> bool:
        """Return whether ``arrive`` is called, with differences of zero, on a rank without a peer in this round.

        The round ends ``step``. By default it is called if another rank has a peer and the algorithm overrides
        ``arrive``, so that all ranks follow one recursion. In a world of one no rank has a peer in any round.
        """
        del step
        return type(self).arrive is not Algorithm.arrive and not round_.is_identity

    def is_sent(self, channel: str, step: int) -> bool:
        """Return whether the exchange after ``step`` sends a channel, whose differences else are zero."""
        del channel, step
        return True

    def channel_round(self, channel: str, round_: Round) -> Round:
        """Return the edges, among the round's, and weights by which a channel is sent; by default the round itself."""
        del channel
        return round_

    def check_optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Raise ValueError if the algorithm cannot work with an optimizer; the text says why, and what to do."""

    def begin(self, bucket: BucketView) -> None:
        """Fill ``bucket.kept`` and ``bucket.numbers``, at the beginning and whenever training starts anew."""
        bucket.kept.update({name: bucket.zeros() for name in self.keeps})
        ones = torch.ones(*bucket.values.shape[:-1], 1, dtype=torch.float64, device=bucket.values.device)
        bucket.numbers.update({name: ones.clone() for name in self.numbers})
        bucket.numbers.update({name: torch.zeros_like(ones) for name in self.counts})

    def arrive(self, bucket: BucketView, got: Mapping[str, Arrived]) -> None:
        """Combine what has arrived, in place; by default with the values and what is kept under a channel's name.

        ``got`` is what arrived, by channel and number, of the round ``bucket.round_index``. With one channel it is
        called piecewise, each time with a view of a part of the bucket; with several channels once.
        """
        for channel in self.sends[1:]:
            if channel in bucket.kept:
                bucket.kept[channel].add_(got[channel].difference)
        self.combine_(bucket.values, got[VALUES].difference, bucket.round_index)

    def combine_(self, values: torch.Tensor, difference: torch.Tensor, round_index: int) -> None:
        """Mix into ``values``, in place, what arrived of a round; used for parameters and buffers that are averaged.

        ``difference``, [..., numel], is that of :class:`Arrived`; it is used as scratch space.
        """
        del round_index
        add_(values, difference)

    def gradient(self, bucket: BucketView, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the optimizer receives in place of the gradient, [..., numel]; called only with ``directs``.

        The gradient is in the accumulation dtype. It is not called where the update is skipped, for lack of a gradient
        or because the gradient is not finite.
        """
        del bucket
        return gradient

    def updated(self, bucket: BucketView) -> None:
        """React to the optimizer's update; also called after a skipped one, which counts as an update of zero."""

    def averaged(self, bucket: BucketView) -> None:
        """React to ``global_avg()``, which has made the values the mean over ranks; nothing is in flight."""

    def message(self, bucket: BucketView) -> Mapping[str, torch.Tensor]:
        """Return what is sent, by channel: tensors like the values, which are encoded before anything else happens.

        By default the values and what is kept under a channel's name.
        """
        return {VALUES: bucket.values, **{name: bucket.kept[name] for name in self.sends if name in bucket.kept}}

    def follow(self, before: Algorithm) -> None:
        """Take over the settings of the algorithm of the same class that this one replaces; by default none.

        The ranks have changed, and the topology with them: whatever depends on the topology stays as it is here.
        """
        del before

    @property
    def common(self) -> tuple[str, ...]:
        """The names of the state, and of the counts with it, that is equal on all ranks by definition."""
        names = tuple(name for name, how in self.keeps.items() if how.scope == "common")
        return (*names, *self.counts) if names else ()

    @property
    def kept_numbers(self) -> tuple[str, ...]:
        """The names of the scalars that a rank keeps when ranks are lost or join."""
        return (*(self.numbers if self.keeps_numbers else ()), *self.counts)

    def describe(self) -> str:
        """Return name and constants as text, which is compared between ranks."""
        constants = self._described_constants()
        return f"{type(self).__name__}({constants})" if constants else type(self).__name__

    def _described_constants(self) -> str:
        values = {name: getattr(self, name) for name in self._constants}
        return " ".join(f"{name}={value:{'g' * isinstance(value, float)}}" for name, value in values.items())


class WithForm(Algorithm):
    """Algorithms that await an exchange at the next update or, if the user chooses, before the next forward pass."""

    def __init__(self, form: Form = "awc") -> None:
        if form not in ("awc", "atc"):
            raise ValueError(
                f'form must be "awc" (adapt while communicating) or "atc" (adapt then combine), got {form!r}'
            )
        self.form: Form = form
        self.before_forward = form == "atc"

    def describe(self) -> str:
        return f"{type(self).__name__}({': '.join(filter(None, (self.form, self._described_constants())))})"


class OwnMomentum(Algorithm):
    """Algorithms for ``torch.optim.SGD`` without momentum."""

    remembers_before = True
    follows_learning_rate = True
    _constants = ("beta",)

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = check_real("beta", beta, "at least 0 and below 1", example=0.9)

    def check_optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups):
                raise ValueError(
                    f"algorithm {type(self).__name__} has its own momentum and needs torch.optim.SGD without one, but "
                    f"the optimizer is {type(optimizer).__name__}{' with momentum' * isinstance(optimizer, SGD)}; give "
                    'SGD momentum=0 and the algorithm beta=..., or choose algorithm="integral_correction"'
                )

    def decay_(self, momentum: torch.Tensor, bucket: BucketView) -> None:
        """Multiply by ``beta``, except where the learning rate is 0."""
        is_moving = bucket.is_moving
        momentum.mul_(1 - (1 - self.beta) * is_moving if isinstance(is_moving, torch.Tensor) else self.beta**is_moving)


def add_(values: torch.Tensor, difference: torch.Tensor, factor: float = 1.0) -> None:
    """Add ``factor`` times a difference to ``values`` in the wider dtype of the two; uses up the difference."""
    if values.dtype == difference.dtype:
        values.add_(difference, alpha=factor)
    else:
        values.copy_(difference.mul_(factor).add_(values))
