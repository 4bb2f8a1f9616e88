"""Messages that are the values themselves, unchanged or rounded to half precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import ClassVar

import torch

from gossip.compression.codec import BucketShape, Codec, Compression
from gossip.compression.conversation import (
    Arrival,
    Messages,
    Parts,
    Turn,
    Turns,
    arrived,
    chunks,
    finite_on_host,
    receive_buffers,
    scratch,
    squared_norm,
)
from topologies import Round


class Uncompressed(Compression):
    """The unchanged values."""

    adds_on_wire: ClassVar[bool] = True
    can_clip: ClassVar[bool] = True

    def codec(self, bucket: BucketShape, rank: int) -> ValuesCodec:
        return ValuesCodec(bucket, rank, bucket.dtype)

    def messages(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def describe(self) -> str:
        return "none"


class Cast(Compression):
    r"""The values rounded to the nearest number in half precision: 16 bits each.

    What is below the resolution there, :math:`2^{-8}` of a value with bfloat16 and :math:`2^{-11}` with float16, is
    invisible to the peers: replicas agree up to that and no further. The largest number in float16 is 65504: larger
    values are sent and mixed as that.

    Parameters
    ----------
    dtype : torch.dtype or str
        ``torch.bfloat16`` or ``torch.float16``, or the name of one of them.
    """

    can_clip: ClassVar[bool] = True

    def __init__(self, dtype: torch.dtype | str = torch.bfloat16) -> None:
        by_name = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        chosen = by_name.get(dtype) if isinstance(dtype, str) else dtype
        if chosen is None or chosen not in by_name.values():
            raise ValueError(
                f"dtype must be torch.bfloat16 or torch.float16, or the name of one of them, got {dtype!r}"
            )
        self.dtype = chosen

    def codec(self, bucket: BucketShape, rank: int) -> ValuesCodec:
        return ValuesCodec(bucket, rank, self.dtype)

    def messages(self, values: torch.Tensor) -> torch.Tensor:
        largest = _largest(self.dtype, values.dtype)
        return (values if largest is None else _within(values, largest)).to(self.dtype)

    def describe(self) -> str:
        return "bf16" if self.dtype == torch.bfloat16 else "fp16"


class ValuesCodec(Codec):
    """A codec whose message is the bucket's values in some dtype."""

    def __init__(self, bucket: BucketShape, rank: int, dtype: torch.dtype) -> None:
        self._message = torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
        self._memory = bucket.memory
        self._measures, self._clip = bucket.measures, bucket.clip
        self._rank = rank
        self._wide = bucket.accumulation_dtype
        self._is_exact = dtype == bucket.dtype
        self._largest = _largest(dtype, bucket.dtype)
        self._receive_buffers: list[torch.Tensor] = []
        self._total: torch.Tensor | None = None

    @property
    def sent(self) -> torch.Tensor:
        return self._message

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        message = self._message = self._memory(self._message, step)
        if self._largest is None:
            message.copy_(values)
        else:
            for part in chunks(values.numel(), values.device):
                message[part].copy_(_within(values[part], self._largest))
        del values
        weights = round_.neighbours(self._rank)
        delivery = yield Turn(
            dict.fromkeys(round_.targets(self._rank), message),
            partial(receive_buffers, self._receive_buffers, message, weights),
            self._accumulator if self._is_exact and self._clip is None else None,
        )
        if delivery.total is not None:
            mean = delivery.total
            parts = ((part, mean[part].sub_(message[part])) for part in self._places())
            return Arrival(parts, finite_on_host([mean]))
        measures = self._measures and len(weights) > 1  # that to a single source is known from the sum
        weights = arrived(weights, delivery.received)
        squares: dict[int, float | torch.Tensor] = dict.fromkeys(weights, 0.0) if measures else {}
        return Arrival(
            self._parts(weights, delivery.received, squares), finite_on_host(delivery.received.values()), squares
        )

    def _accumulator(self) -> torch.Tensor:
        if self._message.dtype == self._wide:
            return receive_buffers(self._receive_buffers, self._message, (0,))[0]
        if self._total is None:
            self._total = self._message.new_empty(self._message.numel(), dtype=self._wide)
        return self._total

    @torch.no_grad()
    def _parts(
        self, weights: Mapping[int, float], received: Messages, squares: dict[int, float | torch.Tensor]
    ) -> Parts:
        if not weights:
            return
        if self._clip is not None:
            distances = {source: self._distance(received[source]) for source in weights}
            factors = self._clip(distances, lambda source: min(self._norm(received[source]), self._norm(self._message)))
            weights = {source: weight * factors[source] for source, weight in weights.items()}
        for part in self._places():
            own = self._message[part].to(self._wide)
            total, more = scratch((2, *own.shape), self._wide, own.device).unbind()
            for number, (source, weight) in enumerate(weights.items()):
                message = received[source][part].to(self._wide)
                # In this order it is minus what the peer adds.
                difference = torch.sub(message, own, out=more if number else total)
                if squares:
                    squares[source] = squares[source] + squared_norm(difference)
                if number:
                    total.add_(difference, alpha=weight)
                else:
                    difference.mul_(weight)
            yield part, total

    def _distance(self, received: torch.Tensor) -> float:
        """Return the distance of a message to this rank's own: the same at both ends, whose signs differ."""
        return _root(received[part].to(self._wide) - self._message[part].to(self._wide) for part in self._places())

    def _norm(self, message: torch.Tensor) -> float:
        return _root(message[part].to(self._wide) for part in self._places())

    def _places(self) -> Iterable[slice]:
        return chunks(self._message.numel(), self._message.device)


def _root(parts: Iterable[torch.Tensor]) -> float:
    """Return the Euclidean norm of values that come part by part."""
    return math.sqrt(sum(float(squared_norm(part)) for part in parts))


def _largest(dtype: torch.dtype, of: torch.dtype) -> float | None:
    """Return the largest number of ``dtype`` if values of dtype ``of`` can be larger, otherwise None."""
    return torch.finfo(dtype).max if dtype == torch.float16 != of else None


def _within(values: torch.Tensor, largest: float) -> torch.Tensor:
    """Return ``values`` clamped to ``largest`` in magnitude, except for infinities."""
    if values.is_cpu and not bool(values.abs().amax() > largest):
        return values  # the usual case
    return torch.where(values.isinf(), values, values.clamp(-largest, largest))
