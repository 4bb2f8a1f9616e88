"""Power iteration on the difference between the two ends of an edge, with one product per exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from gossip.compression.codec import NO_MEMORY, BucketShape, Compression, View, WholeCodec, gaps, generator
from gossip.compression.conversation import Arrival, Messages, Turn, Turns, arrived
from topologies import Round, Topology
from topologies.analysis.static_rounds import check_static
from topologies.validation import check_integer


class PowerGossip(Compression):
    r"""Low-rank approximations of the differences between neighbours (PowerGossip).

    A parameter with two or more dimensions is viewed as a matrix X, its first dimension by all others. The two ends of
    an edge share unit vectors v, and each sends :math:`p = X v`; so both know :math:`(X_j - X_i) v`, and use
    :math:`(p_j - p_i) v^T` in place of the difference. In the next exchange they do the same from the other side, with
    u, the direction of :math:`p_j - p_i`, and :math:`s = X^T u`. This is power iteration, which turns u and v towards
    the largest directions in which the two differ. The two kinds of exchange alternate:

    .. math::
        X_i &\leftarrow X_i + \sum_j W_{ij} (p_j - p_i) v_{ij}^T \\
        X_i &\leftarrow X_i + \sum_j W_{ij} u_{ij} (s_j - s_i)^T

    What one end adds for an edge the other one subtracts, so the mean over ranks is exact. There is nothing to tune.
    Parameters with one dimension, and matrices that would not become smaller, are sent as they are. It requires a
    static, undirected topology.

    Parameters
    ----------
    rank : int
        The number of vectors per matrix, edge and exchange.
    seed : int
        The seed of the first directions, and of new ones where there is no difference.

    References
    ----------
    Vogels, Karimireddy and Jaggi, "Practical Low-Rank Communication Compression in Decentralized Deep Learning",
    NeurIPS 2020, algorithm 1.
    """

    def __init__(self, rank: int = 1, *, seed: int = 0) -> None:
        self.rank = check_integer("rank", rank, minimum=1)
        self.seed = check_integer("seed", seed, minimum=0)

    def check(self, topology: Topology) -> None:
        check_static(topology, f"compression {self.describe()}", NO_MEMORY, symmetric=True)

    def codec(self, bucket: BucketShape, rank: int) -> PowerCodec:
        return PowerCodec(self, bucket, rank)

    def describe(self) -> str:
        return f"powergossip(rank={self.rank}, seed={self.seed})"


class PowerCodec(WholeCodec):
    """The messages of one bucket, see :class:`PowerGossip`: the plain values first, then the products.

    Attributes
    ----------
    num_exchanges : int
        The number of exchanges so far; an exchange after an even number multiplies from the right, otherwise from the
        left.
    directions : dict of int to list of Tensor
        By peer, for each matrix: the vectors by which the next exchange multiplies it, [size, rank].
    """

    def __init__(self, compression: PowerGossip, bucket: BucketShape, rank: int) -> None:
        super().__init__(bucket)
        self._num_vectors = compression.rank
        self._seed = compression.seed
        self._rank = rank
        self._bucket = bucket
        self._wide = bucket.accumulation_dtype
        # Only where a message of either kind is at most half as large as the matrix.
        self._matrices = [
            view for view in bucket.views if len(view[0]) > 1 and min(_sides(view)) >= 2 * self._num_vectors
        ]
        self._plain = gaps(bucket.numel, self._matrices)
        self._step = 0
        self.num_exchanges = 0
        self.directions: dict[int, list[torch.Tensor]] = {}

    @property
    def _from_right(self) -> bool:
        return self.num_exchanges % 2 == 0

    def _sizes(self, of_products: bool) -> list[int]:
        """Return the lengths of the vectors that are sent, or of those that matrices are multiplied by."""
        return [_sides(matrix)[self._from_right != of_products] for matrix in self._matrices]

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        weights = round_.neighbours(self._rank)
        self._step = step
        for peer in weights:
            if peer not in self.directions:
                draw = cache(partial(self._draw, peer, self._sizes(of_products=False)))
                self.directions[peer] = [_orthonormal(vectors, draw, number) for number, vectors in enumerate(draw())]
        messages = self._messages_of(values, list(weights))
        del values
        delivery = yield Turn(messages, lambda: {peer: torch.empty_like(each) for peer, each in messages.items()})
        weights = arrived(weights, delivery.received)
        if not weights:
            return Arrival(iter(()), is_finite=True)
        return self._arrival(partial(self._take_in, messages, delivery.received, weights))

    def _messages_of(self, values: torch.Tensor, peers: Sequence[int]) -> dict[int, torch.Tensor]:
        length = sum(segment.stop - segment.start for segment in self._plain)
        length += self._num_vectors * sum(self._sizes(of_products=True))
        messages = {peer: torch.empty(length, dtype=self._wide, device=self._bucket.device) for peer in peers}
        pieces = [self._pieces(message) for message in messages.values()]
        for plain, _ in pieces:
            for segment, piece in zip(self._plain, plain, strict=True):
                piece.copy_(values[segment])
        for number, matrix in enumerate(self._matrices):
            found = _viewed(values, matrix).flatten(1).to(self._wide)
            vectors = torch.cat([self.directions[peer][number] for peer in peers], dim=1)
            products = (found if self._from_right else found.T) @ vectors
            for (_, own), product in zip(pieces, products.split(self._num_vectors, dim=1), strict=True):
                own[number].copy_(product)
        return messages

    def _pieces(self, message: torch.Tensor) -> tuple[Sequence[torch.Tensor], list[torch.Tensor]]:
        """Return the parts of a message as views: the plain segments, and by matrix the product, [size, rank]."""
        plain = [segment.stop - segment.start for segment in self._plain]
        products = [size * self._num_vectors for size in self._sizes(of_products=True)]
        pieces = message.split([*plain, *products])
        return pieces[: len(plain)], [piece.view(-1, self._num_vectors) for piece in pieces[len(plain) :]]

    @torch.no_grad()
    def _take_in(self, messages: Messages, received: Messages, weights: Mapping[int, float]) -> None:
        total = self._difference
        # These are bit-identical at both ends, up to the sign.
        apart = {peer: self._pieces(received[peer] - messages[peer]) for peer in weights}
        for place, segment in enumerate(self._plain):
            total[segment] = 0
            for peer, weight in weights.items():
                total[segment].add_(apart[peer][0][place], alpha=weight)
        sizes = self._sizes(of_products=True)
        fallbacks = {peer: cache(partial(self._draw, peer, sizes)) for peer in weights}
        for number, matrix in enumerate(self._matrices):
            found = {peer: products[number] for peer, (_, products) in apart.items()}
            weighted = torch.cat([found[peer] * weight for peer, weight in weights.items()], dim=1)
            vectors = torch.cat([self.directions[peer][number] for peer in weights], dim=1)
            product = weighted @ vectors.T if self._from_right else vectors @ weighted.T
            viewed = _viewed(total, matrix)
            viewed.copy_(product.view(viewed.shape))
            for peer, difference in found.items():
                # As seen from the lower rank, so that both ends compute the same vectors.
                upwards = difference if peer > self._rank else -difference
                self.directions[peer][number] = _orthonormal(upwards, fallbacks[peer], number)
        self.num_exchanges += 1

    def _draw(self, peer: int, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return random directions for an edge, equal at both of its ends."""
        low, high = sorted((self._rank, peer))
        source = generator(self._seed, self._step, self._bucket.index, low, high)
        flat = torch.randn(sum(sizes) * self._num_vectors, generator=source, dtype=self._wide).to(self._bucket.device)
        parts = flat.split([size * self._num_vectors for size in sizes])
        return [part.view(-1, self._num_vectors) for part in parts]

    def state_dict(self) -> dict[str, Any]:
        peers = list(self.directions)
        flat = [vectors.flatten() for peer in peers for vectors in self.directions[peer]]
        return {
            "num_exchanges": self.num_exchanges,
            "peers": peers,
            "directions": torch.cat(flat) if flat else self._difference.new_empty(0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_exchanges = int(state["num_exchanges"])
        sizes = [size * self._num_vectors for size in self._sizes(of_products=False)]
        parts = iter(state["directions"].to(self._difference, copy=True).split(sizes * len(state["peers"])))
        self.directions = {peer: [next(parts).view(-1, self._num_vectors) for _ in sizes] for peer in state["peers"]}


def _sides(matrix: View) -> tuple[int, int]:
    """Return the numbers of rows and columns."""
    shape, _, _ = matrix
    return shape[0], math.prod(shape[1:])


def _viewed(flat: torch.Tensor, matrix: View) -> torch.Tensor:
    """Return the parameter's values in their own shape, as a view of the bucket's flat ones."""
    shape, stride, offset = matrix
    return flat.as_strided(shape, stride, flat.storage_offset() + offset)


def _orthonormal(vectors: torch.Tensor, fallbacks: Callable[[], Sequence[torch.Tensor]], number: int) -> torch.Tensor:
    """Orthonormalise the columns one by one, using ``fallbacks()[number]`` for a column of which nothing is left.

    Two passes suffice: what rounding leaves of the preceding columns is gone after the second one.
    """
    roundings = 16 * torch.finfo(vectors.dtype).eps
    columns: list[torch.Tensor] = []
    for place, column in enumerate(vectors.unbind(1)):
        chosen = _without(_scaled(column), columns)
        length = torch.linalg.vector_norm(chosen)
        # False also if something is not finite. On a GPU the host does not wait for the result.
        is_left = length > roundings
        if not is_left.is_cpu or not bool(is_left):
            fallback = _without(_scaled(fallbacks()[number][:, place]), columns)
            chosen = torch.where(is_left, chosen, fallback)
            length = torch.linalg.vector_norm(chosen)
        chosen = _without(chosen / length, columns)
        columns.append(chosen / torch.linalg.vector_norm(chosen))
    return torch.stack(columns, dim=1)


def _scaled(column: torch.Tensor) -> torch.Tensor:
    """Scale a column to length 1, without overflow."""
    column = column / column.abs().amax()
    length: torch.Tensor = torch.linalg.vector_norm(column)
    return column / length


def _without(column: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    for other in others:
        column = column - other * (other @ column)
    return column
