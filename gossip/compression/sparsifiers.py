"""Operators that keep a part of a tensor: the largest values, random ones, or only signs."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gossip.compression.codec import BucketShape, generator
from gossip.compression.conversation import chunks

WeightedMessages = Sequence[tuple[torch.Tensor, float | torch.Tensor]]
"""Payloads with their weights: a number, or one per rank, [g, 1], float64."""


@dataclass(frozen=True)
class Part:
    """Some blocks that are processed together.

    Attributes
    ----------
    values : slice
        Their place in the bucket.
    num_blocks, width : int
        They hold ``num_blocks * width`` values.
    """

    values: slice
    num_blocks: int
    width: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return these blocks of flat values, [..., num_blocks, width], as a view."""
        return flat[..., self.values].view(*flat.shape[:-1], self.num_blocks, self.width)


def parts_of(numel: int, block_numel: int, device: torch.device) -> Iterator[Part]:
    """Yield full blocks, as many at a time as fit a CPU's cache, and finally the shorter one, if any."""
    num_full = numel // block_numel
    for piece in chunks(num_full * block_numel, device):
        number = (piece.stop - piece.start) // block_numel
        yield Part(piece, number, block_numel)
    if rest := numel - num_full * block_numel:
        yield Part(slice(numel - rest, numel), 1, rest)


class Sparsifier(ABC):
    """The operator C(x - y), where x are a bucket's values and y is their public copy.

    The decoded result depends only on the payload, ``seed``, step and bucket, so it is equal on all ranks that read it.
    All tensors may have leading dimensions, which are ranks; payloads are then rows of :func:`message_rows`.

    Attributes
    ----------
    block_numel : int
        The number of values that are processed independently of others.
    num_bytes : int
        The size of a payload.
    """

    block_numel: ClassVar[int]
    num_bytes: int

    def __init__(self, bucket: BucketShape, ratio: float, seed: int) -> None:
        self.bucket = bucket
        self.ratio = ratio
        self.seed = seed
        self.wide = bucket.accumulation_dtype
        self.parts = tuple(parts_of(bucket.numel, self.block_numel, bucket.device))

    def begin(self, step: int) -> None:  # noqa: B027 -- most draw nothing
        """Draw the random numbers that the messages of a step need."""

    @abstractmethod
    def encode_(self, values: torch.Tensor, known: torch.Tensor, payload: torch.Tensor) -> None:
        """Write C(values - known) into ``payload``, and add its finite entries to ``known``."""

    @abstractmethod
    def add_(self, total: torch.Tensor, number: int, messages: WeightedMessages) -> torch.Tensor:
        """Add the weighted messages, finite entries only, to part ``number`` of ``total``, [numel], float64.

        Return 0, or NaN if an entry was not finite, [1], float64.
        """


class TopK(Sparsifier):
    """The values of largest magnitude in each block, with their places in it."""

    block_numel = 4096

    def __init__(self, bucket: BucketShape, ratio: float, seed: int) -> None:
        super().__init__(bucket, ratio, seed)
        self._kept, num_values = _one_after_another(
            part.num_blocks * num_kept(self.ratio, part.width) for part in self.parts
        )
        self._values_bytes = num_values * self.wide.itemsize
        self.num_bytes = self._values_bytes + 2 * num_values

    def _values(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[..., : self._values_bytes].view(self.wide)

    def _places(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[..., self._values_bytes : self.num_bytes].view(torch.int16)

    def encode_(self, values: torch.Tensor, known: torch.Tensor, payload: torch.Tensor) -> None:
        kept_values, kept_places = self._values(payload), self._places(payload)
        for part, kept in zip(self.parts, self._kept, strict=True):
            public = part.of(known)
            difference = part.of(values) - public
            places = difference.abs().topk(num_kept(self.ratio, part.width), dim=-1, sorted=False).indices
            chosen = difference.gather(-1, places)
            kept_values[..., kept].view(chosen.shape).copy_(chosen)
            kept_places[..., kept].view(places.shape).copy_(places)
            public.scatter_add_(-1, places, finite(chosen))

    def add_(self, total: torch.Tensor, number: int, messages: WeightedMessages) -> torch.Tensor:
        part, kept = self.parts[number], self._kept[number]
        blocks = part.of(total)
        shape = *blocks.shape[:-1], num_kept(self.ratio, part.width)
        not_finite = total.new_zeros((*total.shape[:-1], 1))  # one per rank
        for payload, weight in messages:
            values = self._values(payload)[..., kept].double()
            places = self._places(payload)[..., kept].long()
            not_finite += values.sum(-1, keepdim=True)
            blocks.scatter_add_(-1, places.view(shape), finite(values).mul_(weight).view(shape))
        return not_finite.mul_(0)


class RandomK(Sparsifier):
    """One value at a random place in every stretch of ``1 / ratio`` values; the places are not sent.

    The places are the same on all ranks. What all replicas have moved in common since a value was last sent is
    therefore not mistaken for a difference between them.
    """

    block_numel = 1

    def __init__(self, bucket: BucketShape, ratio: float, seed: int) -> None:
        super().__init__(bucket, ratio, seed)
        # A single part, because every place costs a cache line wherever it is.
        self.parts = (Part(slice(0, bucket.numel), 1, bucket.numel),)
        number = num_kept(self.ratio, bucket.numel)
        bounds = torch.arange(number + 1) * bucket.numel // max(number, 1)
        self._starts, self._lengths = bounds[:-1], bounds.diff().float()
        self._places = self._starts
        self.num_bytes = number * self.wide.itemsize

    def begin(self, step: int) -> None:
        uniform = torch.rand(len(self._starts), generator=generator(self.seed, step, self.bucket.index))
        self._places = uniform.mul_(self._lengths).long().add_(self._starts).to(self.bucket.device)

    def encode_(self, values: torch.Tensor, known: torch.Tensor, payload: torch.Tensor) -> None:
        chosen = values[..., self._places].to(self.wide) - known[..., self._places]
        known.scatter_add_(-1, self._places.expand(chosen.shape), finite(chosen))
        # A value that is not finite might be in none of the places that are sent.
        apart = values.amin(-1, keepdim=True) - values.amax(-1, keepdim=True)
        self._values(payload).copy_(chosen.add_(apart.to(self.wide).mul_(0)))

    def _values(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[..., : self.num_bytes].view(self.wide)

    def add_(self, total: torch.Tensor, number: int, messages: WeightedMessages) -> torch.Tensor:
        del number
        not_finite = total.new_zeros((*total.shape[:-1], 1))  # one per rank
        for payload, weight in messages:
            values = self._values(payload).double()
            not_finite += values.sum(-1, keepdim=True)
            total.scatter_add_(-1, self._places.expand(values.shape), finite(values).mul_(weight))
        return not_finite.mul_(0)


class Sign(Sparsifier):
    r"""One bit per value, and one number per block: :math:`\|x\|_1 / d \cdot \mathrm{sign}(x)`.

    A value far larger than the others in its block takes up to as many exchanges as the block has values, so blocks are
    small. Their numbers are not rounded to half precision: multiples of coarse steps would be rounded the same way,
    again and again, where they are added to float32 parameters.
    """

    block_numel = 32

    def __init__(self, bucket: BucketShape, ratio: float, seed: int) -> None:
        super().__init__(bucket, ratio, seed)
        self._scales_bytes = sum(part.num_blocks for part in self.parts) * self.wide.itemsize
        self._bits, self.num_bytes = _one_after_another(
            (-(-part.num_blocks * part.width // 8) for part in self.parts), self._scales_bytes
        )
        self._shifts = torch.arange(8, dtype=torch.uint8, device=bucket.device)[:, None]

    def _scales(self, part: Part, payload: torch.Tensor) -> torch.Tensor:
        scales = payload[..., : self._scales_bytes].view(self.wide)
        first = part.values.start // self.block_numel
        return scales[..., first : first + part.num_blocks]

    def encode_(self, values: torch.Tensor, known: torch.Tensor, payload: torch.Tensor) -> None:
        integers = torch.int64 if self.wide == torch.float64 else torch.int32
        for part, place in zip(self.parts, self._bits, strict=True):
            public = part.of(known)
            difference = part.of(values) - public
            scales = self._scales(part, payload).copy_(difference.abs().mean(-1))
            negative = (difference.view(integers) < 0).view(torch.uint8)  # several times as fast as signbit()
            # Bit p of a byte is a value of the p-th eighth of the part.
            bits = payload[..., place]
            missing = 8 * bits.shape[-1] - part.num_blocks * part.width
            planes = torch.constant_pad_nd(negative.view(*bits.shape[:-1], -1), (0, missing))
            planes = planes.view(*bits.shape[:-1], 8, -1).bitwise_left_shift_(self._shifts)
            for half in (4, 2):
                planes = planes[..., :half, :].bitwise_or_(planes[..., half:, :])
            torch.bitwise_or(planes[..., 0, :], planes[..., 1, :], out=bits)
            public.add_(torch.copysign(finite(scales)[..., None], difference, out=difference))

    def add_(self, total: torch.Tensor, number: int, messages: WeightedMessages) -> torch.Tensor:
        part, place = self.parts[number], self._bits[number]
        blocks = part.of(total)
        not_finite, steps = (total.new_zeros((*each.shape[:-1], 1)) for each in (total, blocks))
        for payload, weight in messages:
            scales = self._scales(part, payload).double()
            not_finite += scales.sum(-1, keepdim=True)
            step = finite(scales).mul_(weight)[..., None]
            steps += step
            planes = (payload[..., None, place] >> self._shifts).bitwise_and_(1).view(*payload.shape[:-1], -1)
            negative = planes[..., : part.num_blocks * part.width].view(blocks.shape).double()
            blocks.addcmul_(negative, step, value=-2)  # 1 - 2 b is the sign
        blocks.add_(steps)
        return not_finite.mul_(0)


SPARSIFIERS: dict[str, type[Sparsifier]] = {"top_k": TopK, "random_k": RandomK, "sign": Sign}


def num_kept(ratio: float, width: int) -> int:
    """Return how many of ``width`` values are sent."""
    return min(width, math.ceil(ratio * width))


def _one_after_another(sizes: Iterable[int], start: int = 0) -> tuple[list[slice], int]:
    """Return the places of pieces of these sizes, from ``start`` on, and the end of the last one."""
    ends = list(itertools.accumulate(sizes, initial=start))
    return [slice(*ends) for ends in itertools.pairwise(ends)], ends[-1]


def finite(values: torch.Tensor) -> torch.Tensor:
    """Return a copy with zeros in place of entries that are not finite."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
