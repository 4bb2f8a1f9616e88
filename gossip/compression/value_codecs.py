"""Messages that are the values themselves, as they are or rounded to half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gossip.compression.codec import BucketShape, Codec, Compression, Messages, Parts, chunks
from gossip.compression.part_memory import all_finite, scratch
from topologies import Round


class Uncompressed(Compression):
    """The values as they are."""

    def codec(self, bucket: BucketShape, rank: int) -> ValuesCodec:
        return ValuesCodec(bucket, rank, bucket.dtype)

    def messages(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def describe(self) -> str:
        return "none"


class Cast(Compression):
    r"""The values rounded to half precision, to the nearest: 16 bits each.

    What is below the resolution there, :math:`2^{-8}` of a value with bfloat16 and :math:`2^{-11}` with float16, is not
    seen by the peers: replicas agree up to that and no further. float16 ends at 65504: larger values are sent as that,
    and mixed as that.

    Parameters
    ----------
    dtype : torch.dtype or str
        ``torch.bfloat16`` or ``torch.float16``, or its name.
    """

    def __init__(self, dtype: torch.dtype | str = torch.bfloat16) -> None:
        by_name = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        chosen = by_name.get(dtype) if isinstance(dtype, str) else dtype
        if chosen is None or chosen not in by_name.values():
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, or one's name, got {dtype!r}")
        self.dtype = chosen

    def codec(self, bucket: BucketShape, rank: int) -> ValuesCodec:
        return ValuesCodec(bucket, rank, self.dtype)

    def messages(self, values: torch.Tensor) -> torch.Tensor:
        largest = _largest(self.dtype, values.dtype)
        return (values if largest is None else _within(values, largest)).to(self.dtype)

    def describe(self) -> str:
        return "bf16" if self.dtype == torch.bfloat16 else "fp16"


class ValuesCodec(Codec):
    """The message is the bucket's values in some dtype.

    Attributes
    ----------
    message : Tensor, [numel]
    is_exact : bool
        Whether they are the values as they are: then the messages of several ranks may also be added on the wire.
    take : callable
        ``(step) -> Tensor``: where the message of a step is to be made, memory of the message's dtype and size.
    """

    def __init__(self, bucket: BucketShape, rank: int, dtype: torch.dtype) -> None:
        self.message = torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
        self.take: Callable[[int], torch.Tensor] = lambda _: self.message
        self._rank = rank
        self._wide = bucket.accumulation_dtype
        self.is_exact = dtype == bucket.dtype
        self._largest = _largest(dtype, bucket.dtype)
        self._weights: dict[int, float] = {}
        self._rows = self.message.new_empty((0, bucket.numel))
        self._difference: torch.Tensor | None = None

    @property
    def sent(self) -> torch.Tensor:
        return self.message

    @torch.no_grad()
    def encode(self, values: torch.Tensor, round_: Round, step: int) -> Messages:
        self.message = self.take(step)
        if self._largest is None:
            self.message.copy_(values)
        else:
            for part in chunks(values.numel(), values.device):
                self.message[part].copy_(_within(values[part], self._largest))
        self._weights = round_.neighbours(self._rank)
        return dict.fromkeys(round_.targets(self._rank), self.message)

    def receive_buffers(self) -> Messages:
        if len(self._rows) < len(self._weights):
            self._rows = self.message.new_empty((len(self._weights), self.message.numel()))
        return dict(zip(self._weights, self._rows, strict=False))

    def accumulator(self) -> torch.Tensor:
        """Memory for a sum over ranks that is made on the wire, [numel], in the dtype of accumulation."""
        if self.message.dtype == self._wide:
            if not len(self._rows):
                self._rows = self.message.new_empty((1, self.message.numel()))
            return self._rows[0]
        if self._difference is None:
            self._difference = self.message.new_empty(self.message.numel(), dtype=self._wide)
        return self._difference

    def is_finite(self, received: Messages) -> bool:
        return all(all_finite(message) for message in received.values())

    @torch.no_grad()
    def decode(self, received: Messages) -> Parts:
        weights = list(self._weights.items())
        if not weights:
            return
        for part in chunks(self.message.numel(), self.message.device):
            ours = self.message[part].to(self._wide)
            total, more = scratch((2, *ours.shape), self._wide, ours.device)
            for number, (source, weight) in enumerate(weights):
                theirs = received[source][part].to(self._wide)
                if number == 0:
                    torch.sub(theirs, ours, out=total).mul_(weight)
                else:
                    theirs = torch.sub(theirs, ours, out=more)  # in this order it is minus what the peer adds
                    total.add_(theirs, alpha=weight)
            yield part, total

    @torch.no_grad()
    def decode_sum(self, mean: torch.Tensor) -> Parts:
        """As :meth:`decode`, of the weighted sum of the messages, which lies in the accumulator."""
        for part in chunks(self.message.numel(), self.message.device):
            yield part, mean[part].sub_(self.message[part])


def _largest(dtype: torch.dtype, of: torch.dtype) -> float | None:
    """Beyond what ``dtype`` ends, where values of another one may be larger."""
    return torch.finfo(dtype).max if dtype == torch.float16 != of else None


def _within(values: torch.Tensor, largest: float) -> torch.Tensor:
    """``values`` with what is larger set to ``largest``, but for infinity."""
    if values.is_cpu and not bool(values.abs().amax() > largest):
        return values  # the usual case
    return torch.where(values.isinf(), values, values.clamp(-largest, largest))
