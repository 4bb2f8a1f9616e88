"""Messages of 8 or 4 bits per value: a value's place on a lattice, modulo the size of the code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from gossip.compression.codec import (
    BucketShape,
    Codec,
    Compression,
    Edges,
    KnownRounds,
    Readers,
    StackedArrival,
    StackedCodec,
    generator,
    message_rows,
    row_slices,
)
from gossip.compression.compiled_passes import passes
from gossip.compression.conversation import Arrival, Parts, Turn, Turns, all_finite, chunks, receive_buffers
from gossip.compression.eager_passes import in_blocks
from gossip.compression.lattice import COARSEST, LEVELS_PER_OCTAVE, NOISE_PERIOD, RAW, Layout, levels_of
from topologies import Round
from topologies.validation import check_integer, check_real


class ModuloQuantization(Compression):
    r"""Stochastic rounding to a lattice, of whose coordinates only the last bits are sent (Moniqua).

    The value x of rank j becomes the integer :math:`k_j = \lfloor x / \delta + \xi \rfloor`, with :math:`\xi` uniform
    in [0, 1), so that :math:`m_j = \delta k_j` equals x in expectation and is at most :math:`\delta` away. The message
    is :math:`k_j \bmod 2^{b}`. Rank i knows :math:`k_i`, and as long as the two differ by less than :math:`2^{b-1}` it
    can restore the rest. No state is kept about any neighbour, so it serves every topology, including time-varying
    pairs, and the mean over ranks is exact however values were rounded. All ranks round with the same :math:`\xi`,
    drawn from seed, step and bucket: equal values stay equal, and the closer two replicas are, the less noise there is
    between them.

    Each block of 4,096 values has its own :math:`\delta`, a power of two that follows the largest recent difference
    between peers, times ``headroom``. Each block carries a checksum of its :math:`k_j`. Where two ranks differ by more
    than the code can express, the checksum does not match, and the block is requested again and sent in full. This
    happens after a jump of the replicas, and in the first exchange of values that did not start equal on all ranks;
    ``num_resent`` counts such blocks. If the values did start equal, the first lattice has room for twice the distance
    that the rank has moved, because two ranks that have each moved that far are no further apart, and the second one
    for twice the distance of the first peers: two ranks that have not met yet have each moved twice.

    Parameters
    ----------
    bits : int
        The size of a code, 8 or 4.
    headroom : float
        Differences of up to this factor times the largest recent one fit the code. With a larger factor fewer blocks
        are sent again, and rounding is coarser.
    seed : int
        The seed of the rounding.

    References
    ----------
    Lu and De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", ICML 2020. Davies et al., "New Bounds
    for Distributed Mean Estimation and Variance Reduction", ICLR 2021, for the check of a decoding by its digest.
    """

    follows_up = True
    can_clip = True

    def __init__(self, bits: int = 8, *, headroom: float = 1.5, seed: int = 0) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {bits!r}")
        self.bits = bits
        self.headroom = check_real("headroom", headroom, "at least 1 and finite", example=1.5)
        self.seed = check_integer("seed", seed, minimum=0)

    def codec(self, bucket: BucketShape, rank: int) -> ModuloCodec:
        return ModuloCodec(self, bucket, rank)

    def stacked_codec(self, bucket: BucketShape, world_size: int) -> StackedModuloCodec:
        return StackedModuloCodec(self, bucket, world_size)

    def describe(self) -> str:
        return f"int{self.bits}(headroom={self.headroom:g}, seed={self.seed})"


@dataclass
class Read:
    """The decoded message of one source.

    Attributes
    ----------
    differences : Tensor, [num_blocks, block_numel], int8
        The differences between the source's codes and the reader's.
    sizes : Tensor, [num_blocks], float64
        The lattice constants of which the differences are multiples.
    resent : Tensor, [num_blocks], bool
        The blocks whose differences are invalid, which are requested in full.
    rows : Tensor, [num_resent, block_numel]
        Those blocks, once they have arrived.
    """

    differences: torch.Tensor
    sizes: torch.Tensor
    resent: torch.Tensor
    rows: torch.Tensor


class ModuloArithmetic:
    """The conversion of one bucket's values to messages, and of messages to differences.

    All tensors may have leading dimensions, which are ranks.

    Attributes
    ----------
    layout : Layout
        The layout of the messages.
    """

    def __init__(self, compression: ModuloQuantization, bucket: BucketShape) -> None:
        self.layout = Layout.of(bucket.numel, compression.bits)
        self._compression = compression
        self._spread = 2 * compression.headroom / 2**compression.bits
        self._bucket, self._numel = bucket.index, bucket.numel
        self._passes = {device: passes(self.layout, device) for device in {bucket.device, torch.device("cpu")}}

    def first_levels(self, values: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Return the first exchange's levels, [..., num_blocks], int16, of ranks that all had ``start``, [numel]."""
        block_numel, num_blocks = self.layout.block_numel, self.layout.num_blocks
        distances = torch.empty((*values.shape[:-1], num_blocks), dtype=start.dtype, device=values.device)
        for part in chunks(values.shape[-1], values.device):
            apart = in_blocks(values[..., part], block_numel) - in_blocks(start[part], block_numel)
            first = part.start // block_numel
            distances[..., first : first + apart.shape[-2]] = apart.abs_().amax(-1)
        return levels_of(2 * self._spread * distances.double()).masked_fill_(~distances.isfinite(), RAW)

    def second_levels(self, levels: torch.Tensor) -> torch.Tensor:
        """Return the second exchange's levels, given those that the first one would have needed."""
        return torch.where(levels == RAW, levels, (levels + LEVELS_PER_OCTAVE).clamp_(max=COARSEST))

    def encode(
        self, values: torch.Tensor, levels: torch.Tensor, step: int, points: torch.Tensor, message: torch.Tensor
    ) -> Iterator[int]:
        """Write message and points as :meth:`EagerPasses.encode`, and yield how many bytes from the start are final."""
        device = values.device
        offsets = _offsets(self._compression.seed, step, self._bucket, self.layout.num_offsets).to(device)
        for num_blocks in self._passes[device].encode(values, levels.to(device), offsets, points, message):
            yield num_blocks * self.layout.code_bytes
        yield self.layout.num_bytes

    def read(
        self, own: torch.Tensor, peers: torch.Tensor, unpacked: Callable[[], torch.Tensor], wanted: torch.Tensor
    ) -> Read:
        """Return the differences between a peer's message and this rank's, with no rows yet.

        See :meth:`EagerPasses.check`; ``unpacked`` returns memory for them, called if codes have 4 bits.
        """
        differences = self.layout.codes(peers).view(torch.int8) if self.layout.bits == 8 else unpacked()
        resent, sizes = self._passes[own.device].check(own, peers, self._spread, differences, wanted)
        return Read(differences, sizes, resent, torch.empty(0))

    def learn_from_rows(self, read: Read, points: torch.Tensor, wanted: torch.Tensor) -> bool:
        """Raise ``wanted`` to fit the blocks that were sent in full; return whether these and our own are finite."""
        own = points[read.resent.to(points.device)].to(read.rows.device)
        peaks = (read.rows - own).abs_().amax(1)
        is_finite = torch.isfinite(peaks)
        needed = levels_of(self._spread * peaks.double()).masked_fill_(~is_finite, RAW)
        wanted[read.resent] = torch.maximum(wanted[read.resent], needed)
        return bool(is_finite.all()) or (all_finite(read.rows) and all_finite(own))

    def distance(self, read: Read, points: torch.Tensor) -> float:
        """Return the distance of what was read, [num_blocks, block_numel], to this rank's own points."""
        sizes = (read.sizes / self._passes[points.device].unit).masked_fill_(read.resent, 0.0)
        lengths = torch.linalg.vector_norm(read.differences.float(), dim=1).double() * sizes.to(read.differences.device)
        total = float(lengths.square().sum())
        if read.rows.shape[0]:
            own = points[read.resent.to(points.device)].to(read.rows.device)
            total += float(torch.linalg.vector_norm(read.rows - own, dtype=torch.float64)) ** 2
        return math.sqrt(total)

    def parts(self, points: torch.Tensor, reads: Iterable[tuple[Read, float | torch.Tensor]]) -> Parts:
        """Yield part by part the weighted sum of the differences between what was read and this rank's own points.

        A weight is a number, or one per rank, [g, 1], float64.
        """
        device, dtype, block_numel = points.device, points.dtype, self.layout.block_numel
        passes_here = self._passes[device]
        scaled, rows = [], []
        for read, weight in reads:
            scales = (weight / passes_here.unit * read.sizes).masked_fill_(read.resent, 0.0)
            scaled.append((read.differences.to(device), scales.to(device, dtype)))
            if read.rows.shape[0]:
                rows.append((read, weight))
        for blocks, total in passes_here.decode(scaled, dtype):
            for read, weight in rows:
                _add_rows(read, weight, blocks, points, total)
            first, last = blocks.start * block_numel, min(blocks.stop * block_numel, self._numel)
            yield slice(first, last), total.view(*total.shape[:-2], -1)[..., : last - first]


def _add_rows(
    read: Read, weight: float | torch.Tensor, blocks: slice, points: torch.Tensor, total: torch.Tensor
) -> None:
    """Add the blocks that were sent in full to the sum of some blocks."""
    here = read.resent[..., blocks]
    if not bool(here.any()):
        return
    rows = read.rows
    if here.shape != read.resent.shape:
        among = torch.zeros_like(read.resent)
        among[..., blocks] = here
        rows = rows[among[read.resent]]
    if isinstance(weight, torch.Tensor):
        weight = weight.expand(here.shape)[here][:, None].to(total.dtype)
    here = here.to(total.device)
    total[here] += weight * (rows.to(total.device) - points[..., blocks, :][here])


class ModuloCodec(Codec):
    """The messages of one bucket, see :class:`ModuloQuantization`.

    Attributes
    ----------
    levels : Tensor, [num_blocks], int16, CPU
        The binary logarithm of each block's next lattice constant, in eighths; ``RAW`` where nothing is known yet.
    num_resent : int
        The number of blocks that this rank has had to request again so far.
    """

    def __init__(self, compression: ModuloQuantization, bucket: BucketShape, rank: int) -> None:
        self._arithmetic = ModuloArithmetic(compression, bucket)
        self._layout = layout = self._arithmetic.layout
        self._rank, self._numel, self._device = rank, bucket.numel, bucket.device
        self._points = torch.zeros(layout.numel, dtype=bucket.accumulation_dtype, device=bucket.device)
        self._blocks = self._points.view(layout.num_blocks, layout.block_numel)
        self._payload = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=bucket.device)
        self._receive_buffers: list[torch.Tensor] = []
        self._unpacked: list[torch.Tensor] = []
        self._clip = bucket.clip
        self._is_at_start = bucket.start is not None
        if bucket.start is not None:
            self.sent.copy_(bucket.start)
        self.levels = torch.full((layout.num_blocks,), RAW, dtype=torch.int16)
        self.num_resent = 0

    @property
    def sent(self) -> torch.Tensor:
        return self._points[: self._numel]

    def turns(self, values: torch.Tensor, round_: Round, step: int) -> Turns:
        weights, targets = round_.neighbours(self._rank), tuple(round_.targets(self._rank))
        levels, is_first = self.levels, self._is_at_start
        if is_first:
            levels, self._is_at_start = self._arithmetic.first_levels(values, self.sent), False
        encoding = self._arithmetic.encode(values, levels, step, self._blocks, self._payload)
        del values, levels
        messages = dict.fromkeys(targets, self._payload)
        # In the opposite direction along every edge: the blocks that are requested again.
        asked = {target: torch.empty(self._layout.num_blocks, dtype=torch.uint8) for target in targets}
        make_buffers = partial(receive_buffers, self._receive_buffers, self._payload, weights)
        delivery = yield Turn(messages, make_buffers, following=asked, making=encoding)
        del encoding
        sent, received = delivery.on_host
        own = next(iter(sent.values())) if sent else self._payload.cpu()
        wanted = torch.full_like(self.levels, RAW)
        # What is clipped must not make the lattice coarser.
        apart = {source: wanted if self._clip is None else wanted.clone() for source in received}
        reads = {
            source: self._read(own, message, number, apart[source])
            for number, (source, message) in enumerate(received.items())
        }
        asking = yield Turn({source: read.resent.view(torch.uint8) for source, read in reads.items()}, lambda: asked)
        awaited = {source: read.rows for source, read in reads.items() if read.rows.shape[0]}
        answers = yield Turn(
            {target: self._rows(blocks.view(torch.bool)) for target, blocks in asking.received.items() if blocks.any()},
            lambda: awaited,
        )
        reads = {source: read for source, read in reads.items() if source in answers.received or source not in awaited}
        are_finite = [
            self._arithmetic.learn_from_rows(read, self._blocks, apart[source])
            for source, read in reads.items()
            if read.rows.shape[0]
        ]
        if reads and self._clip is None:
            self._follow(wanted, is_first)
        return Arrival(self._parts(weights, reads, apart, is_first), self._device.type != "cpu" or all(are_finite))

    def _read(self, own: torch.Tensor, peers: torch.Tensor, number: int, wanted: torch.Tensor) -> Read:
        read = self._arithmetic.read(own, peers, partial(self._unpacked_of, number), wanted)
        num_resent = int(read.resent.sum())
        self.num_resent += num_resent
        read.rows = torch.empty((num_resent, self._layout.block_numel), dtype=self._points.dtype)
        return read

    def _follow(self, wanted: torch.Tensor, is_first: bool) -> None:
        self.levels = self._arithmetic.second_levels(wanted) if is_first else wanted

    def _unpacked_of(self, number: int) -> torch.Tensor:
        """Return memory for unpacked differences, which is kept for the next exchange."""
        if number == len(self._unpacked):
            self._unpacked.append(torch.empty(self._blocks.shape, dtype=torch.int8))
        return self._unpacked[number]

    def _rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return this rank's points of some blocks, in full; all blocks are not copied if they are in host memory."""
        return self._blocks.cpu() if bool(blocks.all()) else self._blocks[blocks.to(self._device)].cpu()

    @torch.no_grad()
    def _parts(
        self,
        weights: Mapping[int, float],
        reads: Mapping[int, Read],
        wanted: Mapping[int, torch.Tensor],
        is_first: bool,
    ) -> Parts:
        if reads:
            if self._clip is not None:
                distances = {source: self._arithmetic.distance(read, self._blocks) for source, read in reads.items()}
                factors = self._clip(distances, None)
                weights = {source: weight * factors.get(source, 1.0) for source, weight in weights.items()}
                if whole := [wanted[source] for source in reads if factors[source] == 1]:
                    self._follow(torch.stack(whole).amax(0), is_first)
            found = [(reads[source], weight) for source, weight in weights.items() if source in reads]
            yield from self._arithmetic.parts(self._blocks, found)

    def state_dict(self) -> dict[str, Any]:
        start = {"start": self.sent.to("cpu", copy=True)} if self._is_at_start else {}
        return {"levels": self.levels.clone(), "num_resent": self.num_resent, **start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.levels.copy_(state["levels"])
        self.num_resent = state["num_resent"]
        self._is_at_start = "start" in state
        if self._is_at_start:
            self.sent.copy_(state["start"])


class StackedModuloCodec(StackedCodec):
    """The messages of one bucket on all ranks: the attributes of :class:`ModuloCodec`, a row for each rank.

    They are on the device of the values.
    """

    def __init__(self, compression: ModuloQuantization, bucket: BucketShape, world_size: int) -> None:
        self._arithmetic = ModuloArithmetic(compression, bucket)
        self._layout = layout = self._arithmetic.layout
        device = bucket.device
        self._edges = KnownRounds(partial(Edges, numel=bucket.numel, device=device))
        self._points = torch.zeros((world_size, layout.numel), dtype=bucket.accumulation_dtype, device=device)
        self._blocks = self._points.view(world_size, layout.num_blocks, layout.block_numel)
        self._messages = message_rows(world_size, layout.num_bytes, device)
        self._start = None if bucket.start is None else bucket.start.to(bucket.accumulation_dtype, copy=True)
        self._is_at_start = torch.full((world_size,), self._start is not None)
        self.levels = torch.full((world_size, layout.num_blocks), RAW, dtype=torch.int16, device=device)
        self.num_resent = torch.zeros(world_size, dtype=torch.int64, device=device)

    @torch.no_grad()
    def exchange(self, stacks: Sequence[torch.Tensor], round_: Round, step: int) -> StackedArrival:
        (values,) = stacks
        num_ranks, numel = values.shape
        edges = self._edges.of(round_)
        for rows in row_slices(num_ranks, numel, values.device):
            blocks, messages = self._blocks[rows], self._messages[rows]
            for _ in self._arithmetic.encode(values[rows], self._levels_of(values, rows), step, blocks, messages):
                pass
        difference = torch.zeros_like(values, dtype=self._points.dtype)
        num_bytes = edges.num * (self._layout.num_bytes + self._layout.num_blocks)
        for readers in edges.readers:
            num_bytes += self._take_in(readers, difference)
        self._is_at_start[edges.active] = False
        if self._start is not None and not bool(self._is_at_start.any()):
            self._start = None
        sent = self._points[:, :numel].to(values.dtype, copy=True)
        sent[edges.idle] = values[edges.idle]
        return StackedArrival([difference], [sent], num_bytes)

    def _levels_of(self, values: torch.Tensor, rows: slice) -> torch.Tensor:
        if self._start is None:
            return self.levels[rows]
        is_at_start = self._is_at_start[rows, None].to(values.device)
        return torch.where(is_at_start, self._arithmetic.first_levels(values[rows], self._start), self.levels[rows])

    def _take_in(self, readers: Readers, difference: torch.Tensor) -> int:
        """Fill the rows of these ranks, and return how many bytes were sent to them in full blocks."""
        ranks = readers.ranks
        own, points = self._messages[ranks], self._blocks[ranks]
        wanted = torch.full((*points.shape[:-1],), RAW, dtype=torch.int16, device=points.device)
        reads = []
        num_bytes = 0
        for sources in readers.sources:
            unpacked = partial(torch.empty, points.shape, dtype=torch.int8, device=points.device)
            read = self._arithmetic.read(own, self._messages[sources], unpacked, wanted)
            reads.append(read)
            if bool(read.resent.any()):
                self.num_resent[ranks] += read.resent.sum(1)
                reader, block = read.resent.nonzero(as_tuple=True)
                read.rows = self._blocks[sources[reader], block]
                num_bytes += read.rows.nbytes
        for read in reads:
            if read.rows.shape[0]:
                self._arithmetic.learn_from_rows(read, points, wanted)
        if self._start is not None:
            is_first = self._is_at_start[ranks, None].to(wanted.device)
            wanted = torch.where(is_first, self._arithmetic.second_levels(wanted), wanted)
        self.levels[ranks] = wanted
        for place, part in self._arithmetic.parts(points, zip(reads, readers.weights, strict=True)):
            difference[ranks, place] = part
        return num_bytes

    def state_dict(self, rank: int) -> dict[str, Any]:
        at_start = self._start if bool(self._is_at_start[rank]) else None
        start = {} if at_start is None else {"start": at_start.to("cpu", copy=True)}
        return {"levels": self.levels[rank].to("cpu", copy=True), "num_resent": int(self.num_resent[rank]), **start}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._is_at_start = torch.tensor(["start" in state for state in states])
        starts = [state["start"] for state in states if "start" in state]
        self._start = starts[0].to(self._points) if starts else None
        self.levels.copy_(torch.stack([state["levels"] for state in states]))
        self.num_resent.copy_(torch.tensor([state["num_resent"] for state in states]))


@lru_cache(maxsize=64)
def _offsets(seed: int, step: int, bucket: int, number: int) -> torch.Tensor:
    """Return where the noise of each part begins, [number]: equal on all ranks, of which a process may hold many."""
    return torch.randint(NOISE_PERIOD, (number,), generator=generator(seed, step, bucket))
