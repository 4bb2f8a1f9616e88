"""Messages that describe how a rank's values have moved away from the copy that its peers have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gossip.compression.codec import (
    NO_MEMORY,
    BucketShape,
    Compression,
    Edges,
    KnownRounds,
    StackedArrival,
    StackedCodec,
    WholeCodec,
    message_rows,
)
from gossip.compression.conversation import Messages, Turn, Turns, arrived, chunks, receive_buffers
from gossip.compression.sparsifiers import SPARSIFIERS, Sparsifier, WeightedMessages, finite
from gossip.errors import GossipError
from topologies import Round, Topology
from topologies.analysis.static_rounds import check_static
from topologies.validation import check_integer, check_real

#: The factor between the ratio and gamma, which is at most 1. With twice the factor some topologies diverge.
_GAMMA_PER_RATIO = {"top_k": 2.5, "random_k": 0.5, "sign": 0.5}
_DELIVERED = {"top_k": 1.0, "random_k": 1.0, "sign": 1 / 8}
"""With corrections multiplied by these, quadratics converge; with 2.5 times the factor for signs they do not."""
_RATIO = {"top_k": 1 / 16, "random_k": 1 / 8, "sign": 1.0}

_Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # what is known, the total, and the difference


class Choco(Compression):
    r"""Sparse or one-bit increments of a public copy of each rank's values (CHOCO-Gossip).

    The peers know a public copy :math:`\hat x_i` of the values :math:`x_i` of rank i. Each exchange sends :math:`q_i =
    C(x_i - \hat x_i)`, where C keeps a part; what it drops stays in the difference and is sent later:

    .. math::
        \hat x_i &\leftarrow \hat x_i + q_i, \qquad S_i \leftarrow S_i + \sum_j W_{ij} (q_j - q_i) \\
        x_i &\leftarrow x_i + \gamma S_i

    :math:`S_i = \sum_j W_{ij} (\hat x_j - \hat x_i)` is all that is kept of the peers, whatever their number. The mean
    over ranks is exact, because the :math:`S_i` of all ranks add up to zero. It requires a static, undirected topology,
    that is, one whose exchanges are all equal, including ``every(k)`` of such a topology.

    The first exchange sends the values in full: :math:`\hat x_i = x_i`. Starting from :math:`\hat x_i = 0` instead, the
    differences between the public copies would be of the size of the values themselves wherever one rank had sent a
    value and another one had not yet, and would be mixed in.

    Parameters
    ----------
    sparsifier : str
        "top_k": of each block of 4,096 values, those of largest magnitude, with their places in 2 bytes each.
        "random_k": values at random places that are the same on all ranks and are not sent. "sign": the sign of every
        value in one bit, and the mean magnitude in its block of 32.
    ratio : float, optional
        The share of the values that is sent, by default 1/16 with "top_k" and 1/8 with "random_k"; "sign" ignores it.
    gamma : float, optional
        The consensus step size: the share of the known difference that is mixed in. If it is too large, gossip
        diverges: the less C keeps, the smaller it must be. The default is 2.5 times the ratio with "top_k" and half the
        ratio with "random_k", at most 1, and 0.5 with "sign".
    seed : int
        The seed of the random places.

    Notes
    -----
    For each float32 value it needs 16 bytes in addition to the parameter: the public copy, the sum in float64, whose
    rounding would otherwise accumulate to a drift of the mean, and what is mixed in. The public copy is in float32. Its
    rounding makes replicas differ by about 1e-6 of the largest value after a thousand exchanges, and from then on in
    proportion to the square root of their number. Their mean is not affected.

    References
    ----------
    Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, algorithms 1 and 2, in the form of algorithm 5 that needs no copy per peer. Karimireddy
    et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, for the scaled sign.
    """

    def __init__(
        self, *, sparsifier: str = "top_k", ratio: float | None = None, gamma: float | None = None, seed: int = 0
    ) -> None:
        if sparsifier not in SPARSIFIERS:
            raise ValueError(f"there is no sparsifier {sparsifier!r}; choose one of {', '.join(SPARSIFIERS)}")
        for name, given in (("ratio", ratio), ("gamma", gamma)):
            if given is not None:
                check_real(name, given, "above 0 and at most 1", example=0.1)
        self.seed = check_integer("seed", seed, minimum=0)
        self.sparsifier = sparsifier
        self.ratio = _RATIO[sparsifier] if ratio is None or sparsifier == "sign" else ratio
        self.gamma = min(1.0, _GAMMA_PER_RATIO[sparsifier] * self.ratio) if gamma is None else gamma
        self.delivers = _DELIVERED[sparsifier] * self.gamma

    def check(self, topology: Topology) -> None:
        check_static(topology, f"compression {self.describe()}", NO_MEMORY, symmetric=True)

    def codec(self, bucket: BucketShape, rank: int) -> ChocoCodec:
        return ChocoCodec(SPARSIFIERS[self.sparsifier](bucket, self.ratio, self.seed), self.gamma, rank)

    def stacked_codec(self, bucket: BucketShape, world_size: int) -> StackedChocoCodec:
        return StackedChocoCodec(SPARSIFIERS[self.sparsifier](bucket, self.ratio, self.seed), self.gamma, world_size)

    def describe(self) -> str:
        ratio = f", ratio={self.ratio:g}" * (self.sparsifier != "sign")
        seed = f", seed={self.seed}" * (self.sparsifier == "random_k")
        return f"choco({self.sparsifier}{ratio}{seed}, gamma={self.gamma:g})"


class ChocoCodec(WholeCodec):
    r"""The messages of one bucket, see :class:`Choco`.

    Attributes
    ----------
    known : Tensor, [numel]
        The public copy of this rank's values, :math:`\hat x_i`.
    total : Tensor, [numel], float64
        The sum :math:`S_i`.
    has_begun : bool
        Whether the values have been sent in full.
    """

    def __init__(self, sparsifier: Sparsifier, gamma: float, rank: int) -> None:
        bucket = sparsifier.bucket
        super().__init__(bucket)
        self._sparsifier = sparsifier
        self._gamma = gamma
        self._rank = rank
        self.known = torch.zeros(bucket.numel, dtype=bucket.accumulation_dtype, device=bucket.device)
        self.total = torch.zeros(bucket.numel, dtype=torch.float64, device=bucket.device)
        self.has_begun = False
        self._message = torch.empty(0)
        self._receive_buffers: list[torch.Tensor] = []

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        weights = round_.neighbours(self._rank)
        if self.has_begun:
            if self._message.dtype != torch.uint8:
                self._message = self.known.new_empty(self._sparsifier.num_bytes, dtype=torch.uint8)
                self._receive_buffers = []
            self._sparsifier.begin(step)
        else:
            self._message = torch.empty_like(values)
        _encode(self._sparsifier, self.has_begun, values, self.known, self._message)
        del values
        delivery = yield Turn(
            dict.fromkeys(round_.targets(self._rank), self._message),
            partial(receive_buffers, self._receive_buffers, self._message, weights),
        )
        return self._arrival(partial(self._take_in, delivery.received, arrived(weights, delivery.received)))

    @torch.no_grad()
    def _take_in(self, received: Messages, weights: Mapping[int, float]) -> None:
        own = self._message, -sum(weights.values())
        messages = [own, *((received[source], weight) for source, weight in weights.items())]
        sums = self.known, self.total, self._difference
        _add(self._sparsifier, self.has_begun, messages, sums, self._gamma)
        self.has_begun = True

    def state_dict(self) -> dict[str, Any]:
        return {"known": self.known.clone(), "total": self.total.clone(), "has_begun": self.has_begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.known.copy_(state["known"])
        self.total.copy_(state["total"])
        self.has_begun = bool(state["has_begun"])


class StackedChocoCodec(StackedCodec):
    """The messages of one bucket on all ranks: the attributes of :class:`ChocoCodec`, a row for each rank.

    ``has_begun`` is on the CPU.
    """

    def __init__(self, sparsifier: Sparsifier, gamma: float, world_size: int) -> None:
        bucket = sparsifier.bucket
        self._sparsifier = sparsifier
        self._gamma = gamma
        self._edges = KnownRounds(partial(Edges, numel=bucket.numel, device=bucket.device))
        shape = world_size, bucket.numel
        self.known = torch.zeros(shape, dtype=bucket.accumulation_dtype, device=bucket.device)
        self.total = torch.zeros(shape, dtype=torch.float64, device=bucket.device)
        self.has_begun = torch.zeros(world_size, dtype=torch.bool)

    @torch.no_grad()
    def exchange(self, stacks: Sequence[torch.Tensor], round_: Round, step: int) -> StackedArrival:
        (values,) = stacks
        edges = self._edges.of(round_)
        has_begun = self._have_begun(edges)
        if has_begun:
            self._sparsifier.begin(step)
            messages = message_rows(len(values), self._sparsifier.num_bytes, values.device)
        else:
            messages = torch.empty_like(values)
        for readers in edges.readers:
            known, own = self.known[readers.ranks], messages[readers.ranks]
            _encode(self._sparsifier, has_begun, values[readers.ranks], known, own)
            readers.write_back(own, messages)
            readers.write_back(known, self.known)
        difference = torch.zeros_like(self.known)
        for readers in edges.readers:
            ranks, sources, weights = readers
            received = [(messages[source], weight) for source, weight in zip(sources, weights, strict=True)]
            total, some = self.total[ranks], difference[ranks]
            taken = [(messages[ranks], -sum(weights)), *received]
            _add(self._sparsifier, has_begun, taken, (self.known[ranks], total, some), self._gamma)
            readers.write_back(total, self.total)
            readers.write_back(some, difference)
        self.has_begun[edges.active] = True
        num_bytes = self._sparsifier.num_bytes if has_begun else messages[0].nbytes
        return StackedArrival([difference], [values.clone()], edges.num * num_bytes)

    def _have_begun(self, edges: Edges) -> bool:
        """Return whether all ranks that take part have sent their values in full."""
        begun = self.has_begun[edges.active]
        if bool(begun.any()) and not bool(begun.all()):
            before, new = (edges.active[begun == has][0] for has in (True, False))
            raise GossipError(
                f"rank {before} has exchanged with its peers before, but rank {new} has not, so they expect messages "
                "of different kinds; continue with the topology of the checkpoint"
            )
        return bool(begun.all())

    def state_dict(self, rank: int) -> dict[str, Any]:
        return {
            "known": self.known[rank].clone(),
            "total": self.total[rank].clone(),
            "has_begun": bool(self.has_begun[rank]),
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        for rank, state in enumerate(states):
            self.known[rank].copy_(state["known"])
            self.total[rank].copy_(state["total"])
            self.has_begun[rank] = bool(state["has_begun"])


# The arithmetic of both codecs follows. All tensors may have leading dimensions, which are ranks.


def _encode(
    sparsifier: Sparsifier, has_begun: bool, values: torch.Tensor, known: torch.Tensor, message: torch.Tensor
) -> None:
    """Make the message; the public copy is set to the first values, as far as they are finite, and then follows."""
    if has_begun:
        sparsifier.encode_(values, known, message)
        return
    message.copy_(values)
    for part in chunks(values.shape[-1], values.device):
        known[..., part] = finite(values[..., part])


def _add(sparsifier: Sparsifier, has_begun: bool, messages: WeightedMessages, sums: _Sums, gamma: float) -> None:
    """Add this rank's message, which is the first, and the received ones to the sum, and set the difference."""
    known, total, difference = sums
    if has_begun:
        for number, part in enumerate(sparsifier.parts):
            _scale(part.values, sparsifier.add_(total, number, messages), total, difference, gamma)
        return
    (own, _), *received = messages
    for place in chunks(total.shape[-1], total.device):
        not_finite = own[..., place].double().sum(-1, keepdim=True).mul_(0)
        public = known[..., place].double()
        for message, weight in received:
            values = message[..., place].double()
            not_finite += values.sum(-1, keepdim=True).mul_(0)
            _add_weighted(total[..., place], finite(values).sub_(public), weight)
        _scale(place, not_finite, total, difference, gamma)


def _add_weighted(total: torch.Tensor, values: torch.Tensor, weight: float | torch.Tensor) -> None:
    """Add with a single rounding of product and sum, by ``alpha``, which must be one number for all values."""
    if isinstance(weight, torch.Tensor):
        for row, each, number in zip(total, values, weight.tolist(), strict=True):
            row.add_(each, alpha=number[0])
    else:
        total.add_(values, alpha=weight)


def _scale(part: slice, not_finite: torch.Tensor, total: torch.Tensor, difference: torch.Tensor, gamma: float) -> None:
    sums, scaled, factor = total[..., part], difference[..., part], (not_finite + gamma).to(difference.dtype)
    for piece in chunks(sums.shape[-1], sums.device):
        scaled[..., piece].copy_(sums[..., piece]).mul_(factor)
