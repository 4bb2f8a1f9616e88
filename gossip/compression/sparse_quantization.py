"""The largest values of each block in a few bits each; the sender keeps what a message leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from gossip.compression.codec import BucketShape, Compression, WholeCodec
from gossip.compression.conversation import Messages, Turn, Turns, arrived
from gossip.compression.sparsifiers import Part, num_kept, parts_of
from topologies import Round
from topologies.validation import check_real

BLOCK_NUMEL = 4096


class SparseQuantization(Compression):
    r"""The values of largest magnitude in each block of 4,096, on a grid of :math:`2^b` points; the others become zero.

    The grid is :math:`\pm s/2^b, \pm 3 s/2^b, \ldots`, with s the largest magnitude in the block. A message holds for
    each value its place, 16 bits, and its point, b bits, and for each block s, 32 bits (64 for float64). No state is
    kept: it is for messages whose senders keep what the messages leave out, such as :class:`gossip.SparseLoCo`'s.

    Raises ValueError: an argument is outside its range.

    Parameters
    ----------
    ratio : float
        The share of the values that is sent, above 0 and at most 1.
    bits : int
        b, which is 2, 4 or 8.
    """

    def __init__(self, ratio: float = 1 / 64, bits: int = 2) -> None:
        check_real("ratio", ratio, "above 0 and at most 1", example=1 / 64)
        if bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, got {bits!r}")
        self.ratio, self.bits = ratio, bits

    def codec(self, bucket: BucketShape, rank: int) -> SparseCodec:
        return SparseCodec(bucket, rank, self.ratio, self.bits)

    def describe(self) -> str:
        return f"sparse(ratio={self.ratio:g}, bits={self.bits})"


class SparseCodec(WholeCodec):
    """The messages of one bucket, see :class:`SparseQuantization`.

    A message holds, part by part, the scales of its blocks, the places of their values and the points.
    """

    def __init__(self, bucket: BucketShape, rank: int, ratio: float, bits: int) -> None:
        super().__init__(bucket)
        self._rank, self._ratio, self._bits = rank, ratio, bits
        self._wide = bucket.accumulation_dtype
        self._parts = tuple(parts_of(bucket.numel, BLOCK_NUMEL, bucket.device))
        self._sent = torch.zeros(bucket.numel, dtype=self._wide, device=bucket.device)
        self._shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=bucket.device)

    @property
    def sent(self) -> torch.Tensor:
        return self._sent

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        del step
        message = self._encoded(values)
        del values
        self._sent.zero_()
        self._add_(self._sent, message, 1.0)
        weights = round_.neighbours(self._rank)
        delivery = yield Turn(
            dict.fromkeys(round_.targets(self._rank), message),
            lambda: {source: torch.empty_like(message) for source in weights},
        )
        return self._arrival(partial(self._take_in, delivery.received, arrived(weights, delivery.received)))

    @torch.no_grad()
    def _take_in(self, received: Messages, weights: Mapping[int, float]) -> None:
        torch.mul(self._sent, -sum(weights.values()), out=self._difference)
        for source, weight in weights.items():
            self._add_(self._difference, received[source], weight)

    def _sizes(self, part: Part) -> tuple[int, int, int]:
        """Return the numbers of bytes for scales, places and points."""
        number = part.num_blocks * num_kept(self._ratio, part.width)
        return part.num_blocks * self._wide.itemsize, 2 * number, -(-number * self._bits // 8)

    def _encoded(self, values: torch.Tensor) -> torch.Tensor:
        pieces = []
        for part in self._parts:
            blocks = part.of(values).to(self._wide)
            places = blocks.abs().topk(num_kept(self._ratio, part.width), dim=1, sorted=False).indices
            chosen = blocks.gather(1, places)
            scales = chosen.abs().amax(1, keepdim=True)
            fractions = torch.where(scales > 0, chosen / scales, chosen)
            half = 2 ** (self._bits - 1)
            points = fractions.add_(1).mul_(half).floor_().nan_to_num_(nan=0.0).clamp_(0, 2 * half - 1)
            pieces += [scales.view(-1).view(torch.uint8), places.to(torch.int16).view(-1).view(torch.uint8)]
            pieces.append(self._packed(points.to(torch.uint8).view(-1)))
        return torch.cat(pieces) if pieces else values.new_empty(0, dtype=torch.uint8)

    def _packed(self, points: torch.Tensor) -> torch.Tensor:
        """Pack several points into each byte."""
        per_byte = 8 // self._bits
        padded = torch.constant_pad_nd(points, (0, -len(points) % per_byte)).view(-1, per_byte)
        return (padded << self._shifts).sum(1, dtype=torch.uint8)

    def _unpacked(self, packed: torch.Tensor, number: int) -> torch.Tensor:
        points: torch.Tensor = ((packed[:, None] >> self._shifts) & (2**self._bits - 1)).view(-1)
        return points[:number]

    def _add_(self, total: torch.Tensor, message: torch.Tensor, weight: float) -> None:
        """Add the decoded message times ``weight``."""
        pieces = message.split([size for part in self._parts for size in self._sizes(part)])
        for part, scales, places, packed in zip(self._parts, pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            kept = num_kept(self._ratio, part.width)
            points = self._unpacked(packed, part.num_blocks * kept).view(part.num_blocks, kept)
            grid = points.to(self._wide).add_(0.5).div_(2 ** (self._bits - 1)).sub_(1)
            added = grid.mul_(scales.clone().view(self._wide)[:, None]).mul_(weight)
            at = places.clone().view(torch.int16).view(part.num_blocks, kept).long()
            part.of(total).scatter_add_(1, at, added.to(total))
