"""The exchanges of one rank, over a transport."""

import collections
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from loguru import logger
from torch.optim import Optimizer

from gossip.algorithms import VALUES, Algorithm, Arrived, BucketView
from gossip.compression.codec import BucketShape, Codec, Compression
from gossip.compression.conversation import Arrival, accumulation_dtype, finite_on_host, rehearse_arrival, squared_norm
from gossip.errors import GossipError
from gossip.exchange.clipping import Clipping, clips_above
from gossip.exchange.exchanges import CHANNEL_STRIDE, Accepted, Exchanges, Outgoing, corrupted, row_sum
from gossip.exchange.messages_in_flight import Known, MessagesInFlight
from gossip.exchange.outlier_detection import NUM_ASTRAY, Edge, OutlierDetector
from gossip.exchange.transport import Transport
from gossip.measuring.step_stats import Meter
from gossip.parameters.buckets import Bucket
from gossip.parameters.buffers import BufferBucket
from gossip.parameters.serializable_state import compact
from gossip.private_torch import fast_range
from topologies import Round, Topology

AnyBucket = Bucket | BufferBucket
Memory = Callable[[torch.Tensor, int], torch.Tensor]


class RankExchanges(Exchanges[MessagesInFlight, Meter]):
    """The exchanges of one rank."""

    def __init__(
        self,
        buckets: Sequence[AnyBucket],
        optimizers: Sequence[Optimizer],
        topology: Topology,
        transport: Transport | None,
        algorithm: Algorithm,
        compression: Compression,
        rank: int,
        max_difference: str | float | None,
    ) -> None:
        super().__init__(optimizers, topology, algorithm, compression)
        self.transport = transport
        # Called, with the reason, when this rank is so far astray that it does not come back by being mixed.
        self.on_astray = self._end_astray
        self._max_difference = max_difference
        self._take_place(rank)
        self._optimizers = optimizers
        self._buckets: list[AnyBucket] = []
        self._views: list[BucketView] = []
        # By bucket and then by channel; empty in a world of one that does not read what it sends.
        self.codecs: list[dict[str, Codec]] = []
        self.add(buckets)

    def _take_place(self, rank: int) -> None:
        """Have this position among the ranks; what is usual along the edges is learnt anew."""
        self._rank, multiple = rank, clips_above(self._max_difference)
        self._watch = None if self._max_difference is None else OutlierDetector(rank, self._norm)
        self._clipping = None if multiple is None else Clipping(rank, multiple)

    def add(self, buckets: Sequence[AnyBucket]) -> None:
        """Exchange these buckets too, from the round of this step on. Local; on all ranks before the same step."""
        self._buckets += buckets
        self.in_flight += [None] * len(buckets)
        for bucket in buckets:
            view = BucketView(bucket.block)
            if isinstance(bucket, Bucket):
                view = BucketView(
                    bucket.block, bucket.parameters, bucket.views, self._optimizers, range(self._rank, self._rank + 1)
                )
                self._begin(view)
            self._views.append(view)
        self.codecs += self._make_codecs(buckets)

    def _make_codecs(self, buckets: Sequence[AnyBucket]) -> list[dict[str, Codec]]:
        if self.transport is None and not self.algorithm.reads_sent:
            return []
        return [self._codecs_of(bucket) for bucket in buckets]

    def _codecs_of(self, bucket: AnyBucket, memory: Memory | None = None) -> dict[str, Codec]:
        """Return the codecs of a bucket by channel; given their ``memory``, those of a stand-in on the meta device."""
        index, codecs = bucket.index, {}
        for number, channel in enumerate(self._channels(index)):
            example = self._like(self._views[index], channel)
            example = example if memory is None else example.detach().to("meta")
            is_number = channel in self.algorithm.numbers
            views = None if is_number or not isinstance(bucket, Bucket) else bucket.shape.views
            place = index + CHANNEL_STRIDE * number
            shape = BucketShape(
                place,
                example,
                views,
                memory=memory or functools.partial(_memory, self.transport, place),
                start=example,
                measures=self._watch is not None and self._clipping is None,
                clip=None
                if views is None or memory is not None or self._clipping is None
                else functools.partial(self._clipping.factors, (index, channel)),
            )
            codecs[channel] = self._compression_of(index, channel).codec(shape, self._rank)
            shape.start = None  # some codecs keep the shape
        return codecs

    def move(self, topology: Topology, transport: Transport | None, algorithm: Algorithm, rank: int) -> None:
        """Exchange along another topology, where this rank has another position, from the next step on. Local.

        Nothing may be in flight; codecs start anew.
        """
        self._topology, self.transport, self.algorithm = topology, transport, algorithm
        self._take_place(rank)
        for view in self._views:
            view.ranks = range(rank, rank + 1) if view.parameters else view.ranks
        self.codecs = self._make_codecs(self._buckets)

    # ------------------------------------------------------------------ late messages

    def combine_(self, index: int, meter: Meter) -> None:
        super().combine_(index, meter)
        self._combine_late(index, meter, waits=False)

    def drop(self) -> None:
        super().drop()
        if self.transport is not None:
            for index in range(len(self._buckets)):
                self.transport.drop(index)

    def combine_late(self, meter: Meter) -> None:
        """Await all messages that steps did not wait for, and combine them."""
        for index in range(len(self._buckets)):
            self._combine_late(index, meter, waits=True)

    def _combine_late(self, index: int, meter: Meter, *, waits: bool) -> None:
        for late in self.transport.late(index, waits=waits) if self.transport is not None else ():
            meter.num_late += 1
            if finite_on_host([late.difference]):
                self.algorithm.combine_(self._views[index].values, late.difference, late.round_index)
                self._written(index)
                late.note(waits)
            else:
                where = f"rank {self._rank}: step {late.round_index + 1}, bucket {index}"
                logger.warning("{}: a late message is not finite and is refused", where)
                meter.num_refused += 1

    # ------------------------------------------------------------------ hooks of the policy

    def views(self, index: int) -> Sequence[BucketView]:
        return self._views[index : index + 1]

    def holds_parameters(self, index: int) -> bool:
        return isinstance(self._buckets[index], Bucket)

    def _takes_part(self, step: int, round_: Round) -> bool:
        if self.transport is None:
            return self.algorithm.steps_alone(step, round_)
        return self._is_in(step, round_, self._rank)

    def _start(self, index: int, messages: Outgoing, round_: Round, step: int, meter: Meter) -> MessagesInFlight:
        in_flight = MessagesInFlight(round_, step)
        if self.algorithm.requires.stochastic != "doubly":
            in_flight.surplus = row_sum(round_, self._rank) - 1
        with fast_range("gossip::send"):
            for number, (channel, (message,)) in enumerate(messages.items()):
                edges = self._edges(index, channel, round_, step)
                in_flight.kinds[channel] = message.shape, accumulation_dtype(message.dtype), message.device
                if self.transport is None or not (edges.peers(self._rank) or self.algorithm.is_asynchronous):
                    nothing = torch.zeros_like(message, dtype=accumulation_dtype(message.dtype))
                    in_flight.exchanges[channel] = Known(nothing)
                    if self._keeps_sent:
                        in_flight.sent[channel] = [self._as_decoded(index, channel, message, edges, step)]
                    continue
                codec = self.codecs[index][channel]
                if self._clipping is not None:
                    self._clipping.expect((index, channel), edges, step)
                conversation = codec.begin(message, edges, step)
                in_flight.codecs[channel] = codec
                in_flight.openings.append(conversation.unmade_opening)
                in_flight.launched_at = in_flight.launched_at or time.perf_counter()
                in_flight.exchanges[channel] = self.transport.start(
                    conversation, edges, step=step, bucket=index + CHANNEL_STRIDE * number
                )
                if codec.sent is not None:
                    in_flight.sent[channel] = [codec.sent]
                if self._watch is not None and channel == VALUES and self.holds_parameters(index):
                    made = message if codec.sent is None else codec.sent
                    self._watch.send(index, made, step, meter, functools.partial(self._was_updated, meter))
        in_flight.count_bytes(meter)
        return in_flight

    def _as_decoded(self, index: int, channel: str, message: torch.Tensor, edges: Round, step: int) -> torch.Tensor:
        """Return a message that no rank receives, as ranks would decode it if the algorithm reads that."""
        if not self.algorithm.reads_sent:
            return message.clone()
        codec = self.codecs[index][channel]
        codec.exchange(message, edges, step)
        assert codec.sent is not None
        return codec.sent

    def _accepted(self, index: int, in_flight: MessagesInFlight, meter: Meter) -> Accepted:
        arrivals = self._await(in_flight, meter)
        with fast_range("gossip::mix"):
            self._show(index, in_flight)
            if not all(arrival.is_finite for arrival in arrivals.values()):
                for arrival in arrivals.values():
                    collections.deque(arrival.parts, maxlen=0)  # codec and transport rely on the iteration
                self._refuse(index, in_flight, meter)
                return
            watched = self._watched(index, in_flight)
            squares: dict[str, float | torch.Tensor] = dict.fromkeys((VALUES, *watched), 0.0)
            view = self._views[index]
            sent = in_flight.sent if self.algorithm.reads_sent else {}
            for part, got in _pieces(in_flight, arrivals, sent):
                for channel in squares:
                    squares[channel] += squared_norm(got[channel].difference)
                square = squares[VALUES]
                if not isinstance(square, torch.Tensor) and not math.isfinite(square):
                    self._refuse(index, in_flight, meter)  # it is this rank's own message: all others are finite
                yield view if part is None else view.part(part), got
            if not self.algorithm.is_asynchronous:  # otherwise it involves any number of ranks
                meter.squared_distances.append(squares[VALUES] * self._squared_distance_scale(in_flight.round))
            if self._watch is not None:
                for channel, edges in watched.items():
                    by_edge = self._squares_by_edge(edges, squares[channel], in_flight.squares.get(channel, {}))
                    if self._clipping is not None:
                        by_edge = {**self._clipping.squares((index, channel))}
                    self._watch.judge((index, channel), in_flight.round_index, by_edge, meter)
            if self._clipping is not None:
                self._settle_clipping(index, in_flight, meter)

    def _watched(self, index: int, in_flight: MessagesInFlight) -> dict[str, Round]:
        """Return the channels that are compared with what is usual, with their edges: of each edge the first one."""
        if self._watch is None or not self.holds_parameters(index) or self.algorithm.is_asynchronous:
            return {}
        round_, step = in_flight.round, in_flight.round_index
        by_channel = {channel: self._edges(index, channel, round_, step) for channel in self.algorithm.sends}
        return {
            channel: edges
            for channel, edges in by_channel.items()
            if edges.peers(self._rank) and (channel == VALUES or edges is not in_flight.round)
        }

    def _squares_by_edge(
        self, edges: Round, square: float | torch.Tensor, squares: Mapping[int, float | torch.Tensor]
    ) -> dict[Edge, float | torch.Tensor]:
        """Return the squared distances by edge, or that to all sources together if no more is known."""
        weights = edges.neighbours(self._rank)
        if squares or len(weights) != 1:
            return {(source,): each for source, each in squares.items()} or {tuple(weights): square}
        ((source, weight),) = weights.items()
        return {(source,): square / weight**2}

    def _settle_clipping(self, index: int, in_flight: MessagesInFlight, meter: Meter) -> None:
        assert self._clipping is not None
        assert self._watch is not None
        moved, norm = self._watch.moved(index), functools.partial(self._norm, index)
        for channel in in_flight.exchanges:
            world_size = self._topology.world_size
            is_astray = self._clipping.settle((index, channel), world_size, moved, norm, meter)
            if is_astray and channel == VALUES:
                self.on_astray(
                    f"rank {self._rank}: step {in_flight.round_index + 1}, bucket {index}: whatever arrived in "
                    f"{NUM_ASTRAY} exchanges was far beyond what is usual and has been clipped: the values of this "
                    "rank are wrong, and do not come back by being mixed"
                )

    def _end_astray(self, why: str) -> None:
        raise GossipError(f"{why}; check its device, and start again from a checkpoint")

    def _norm(self, index: int) -> float:
        block = self._buckets[index].block.detach()
        return float(torch.linalg.vector_norm(block, dtype=torch.float64))  # the squares of finite values may overflow

    def _was_updated(self, meter: Meter) -> bool:
        rates = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups if "lr" in group]
        return not meter.num_skipped and bool(meter.gradient_norm()) and any(float(rate) > 0 for rate in rates)

    def _written(self, index: int) -> None:
        self._buckets[index].written()

    def joined(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return compact(rows[0], "what the algorithm keeps")

    def dealt(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [values]

    def names(self, index: int) -> Sequence[str]:
        return self._buckets[index].names

    def message_as_sent(self, index: int) -> torch.Tensor | None:
        """Return this rank's message of a bucket that is in flight, unless it may be written before the next step."""
        in_flight = self.in_flight[index]
        if in_flight is None or self.algorithm.is_asynchronous:  # ranks that ask for an average change what is shown
            return None
        rows = in_flight.sent.get(VALUES, [])
        return rows[0] if rows else None

    # ------------------------------------------------------------------ memory

    def read_by_others(self) -> Sequence[object]:
        """Return the messages in memory that other ranks read."""
        return () if self.transport is None else self.transport.held()

    def messages(self) -> Sequence[object]:
        """Return the codecs, with the messages as sent and room for what arrives, and what has been awaited."""
        return [*self.codecs, *(each.held() for each in self.in_flight if each is not None)]

    def to_come(self) -> tuple[Sequence[object] | None, Sequence[object] | None]:
        """Return what :meth:`read_by_others` and :meth:`messages` will return in training, if it is known. Local.

        It is, on the meta device, what three exchanges of stand-ins of the buckets keep in the round with most sources:
        the first may be in full, the last is in flight.
        """
        if self.transport is None:
            return (), self.messages()
        rounds = [self._topology.round(number) for number in range(min(self._topology.period or 64, 64))]
        held: dict[object, torch.Tensor] = {}
        try:
            kept = [each for bucket in self._buckets for each in self._rehearse(bucket, rounds, self.transport, held)]
        except Exception:  # a codec, not one of ours, that reads values
            return None, None
        return [held], kept

    def _rehearse(
        self, bucket: AnyBucket, rounds: Sequence[Round], transport: Transport, held: dict[object, torch.Tensor]
    ) -> Iterator[object]:
        """Yield what the exchanges of a bucket keep, and add to ``held`` what others read."""
        asked: dict[int, torch.Tensor] = {}
        codecs = self._codecs_of(bucket, lambda message, _: asked.setdefault(id(message), message))
        for channel, codec in codecs.items():
            edges = (self._most_edges(bucket.index, channel, round_) for round_ in rounds)
            most = max(edges, key=lambda each: len(each.neighbours(self._rank)))
            values = self._like(self._views[bucket.index], channel).detach().to("meta")
            if not most.peers(self._rank):
                yield from (codec, torch.empty_like(values, dtype=accumulation_dtype(values.dtype)))
                continue
            for step in range(3):
                conversation = codec.exchange(values, most, step)
                opening = conversation.opening
                alike = any(id(message) in asked for message in opening.sent.values())
                shown = transport.rehearse(opening, most, bucket.block.device, alike=alike)
                held |= {(bucket.index, channel, number, each.nbytes): each for number, each in enumerate(shown)}
                if step < 2:
                    rehearse_arrival(conversation, most.neighbours(self._rank))
                else:
                    yield from (codec, opening)

    # ------------------------------------------------------------------ saving

    def arrive(self) -> None:
        """Await what is in flight, without applying it.

        Late messages of earlier rounds have been combined before. Late messages of rounds in flight are awaited and
        belong to these: if the rounds are dropped, so are they, as on the peers.
        """
        # The largest first: beside its difference there is then only the message that it is read from.
        for index in sorted(range(len(self.in_flight)), key=lambda index: -self._buckets[index].block.nbytes):
            in_flight = self.in_flight[index]
            if in_flight is not None and self.transport is not None:
                (difference,) = in_flight.differences()[VALUES]
                for late in self.transport.late(index, waits=True):
                    difference.add_(late.difference)
                    late.note(False)

    def state_dict(self) -> dict[str, Any]:
        """Return what is in flight, which has arrived, and copies of the codecs' states, by bucket. Local.

        Training continues as if nothing had been read; the tensors in flight are unchanged until the next step.
        """
        return {
            "in_flight": [
                None if in_flight is None else in_flight.state_dict(with_sent=self._keeps_sent)
                for in_flight in self.in_flight
            ],
            "codecs": [{channel: codec.state_dict() for channel, codec in codecs.items()} for codecs in self.codecs],
            "usual": [] if self._watch is None else self._watch.state_dict(),
            "clipping": None if self._clipping is None else self._clipping.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Drop what is in flight and restore what was, as exchanges that have arrived; None starts anew."""
        self.drop()
        if state is None:
            self.codecs = self._make_codecs(self._buckets)
            return
        for index, saved in enumerate(state["in_flight"]):
            if saved is not None:
                round_, device = self._topology.round(saved["round"]), self.views(index)[0].values.device
                self.in_flight[index] = MessagesInFlight.known(round_, saved, device)
        if self.codecs:  # a rank alone has none; virtual workers have some even then
            for codecs, states in zip(self.codecs, state["codecs"], strict=True):
                for channel, codec in codecs.items():
                    codec.load_state_dict(states[channel])
        if self._watch is not None:
            self._watch.load_state_dict(state.get("usual", []))
        if self._clipping is not None and state.get("clipping") is not None:
            self._clipping.load_state_dict(state["clipping"])

    # ------------------------------------------------------------------ waiting, refusing

    def _await(self, in_flight: MessagesInFlight, meter: Meter) -> dict[str, Arrival]:
        start = time.perf_counter()
        with fast_range("gossip::wait"):
            if self._readers:
                in_flight.differences()
            arrivals = in_flight.arrivals()
        waited_s = time.perf_counter() - start
        meter.exposed_wait_s += waited_s
        last: dict[int, float] = {}
        for exchange in in_flight.exchanges.values():
            for peer, arrived_at in exchange.arrived_at.items():
                last[peer] = max(arrived_at, last.get(peer, arrived_at))
        for peer, arrived_at in last.items():
            meter.wait_by_peer_s[peer] += max(0.0, arrived_at - start)
        if last:
            meter.overlapped_s += max(0.0, min(start, max(last.values())) - in_flight.launched_at)
        in_flight.count_bytes(meter)
        return arrivals

    def _refuse(self, index: int, in_flight: MessagesInFlight, meter: Meter) -> None:
        """Count messages that are not finite, and raise if one is this rank's own."""
        own = [sent for rows in in_flight.sent.values() for sent in rows]
        if not all(bool(tensor.isfinite().all()) for tensor in own or [self._buckets[index].block]):
            raise corrupted(self._rank, index, in_flight.round_index)
        where = f"rank {self._rank}: step {in_flight.round_index + 1}, bucket {index}"
        sources = ", ".join(str(rank) for rank in in_flight.round.neighbours(self._rank))
        logger.warning("{}: a message from one of the ranks {} is not finite and is refused", where, sources)
        meter.num_refused += 1

    def _squared_distance_scale(self, round_: Round) -> float:
        r"""Return the factor that turns :math:`\|\sum_j W_{ij} m_j - m_i\|^2` into the estimated squared distance.

        If the replicas' deviations from their mean are independent and identically distributed, with variance
        :math:`s^2`, then the expectation of that square is :math:`s^2 (\sum_{j \ne i} W_{ij}^2 + (1 - W_{ii})^2)`, and
        the squared consensus distance is :math:`s^2 (n - 1) / n`. For W = J / n the estimate is exact.
        """
        row = round_.row(self._rank)
        kept, size = row.pop(self._rank), self._topology.world_size
        spread = sum(weight * weight for weight in row.values()) + (1 - kept) ** 2
        return (size - 1) / size / spread if spread else 0.0


def _pieces(
    in_flight: MessagesInFlight, arrivals: Mapping[str, Arrival], sent: Mapping[str, Sequence[torch.Tensor]]
) -> Iterator[tuple[slice | None, Mapping[str, Arrived]]]:
    """Yield what has arrived, part by part for one channel, as a whole for several."""
    if len(arrivals) == 1:
        for part, difference in arrivals[VALUES].parts:
            yield part, {VALUES: Arrived(difference, sent[VALUES][0][part] if sent else None)}
        return
    yield (
        None,
        {
            channel: Arrived(in_flight.joined(channel, arrival), sent[channel][0] if sent else None)
            for channel, arrival in arrivals.items()
        },
    )


def _memory(transport: Transport | None, bucket: int, message: torch.Tensor, step: int) -> torch.Tensor:
    return message if transport is None else transport.memory(message, step=step, bucket=bucket)
